"""Text and conversations as samples of tokens (`kind: text`, `kind: chat`; ADR-0047).

`opening` is the door: a section of a job file becomes samples by index. On the way a source becomes one file
of tokens, which is made once on a node and mapped by all its instances; what a sample consists of is then
arithmetic on documents' borders. It decides which tokens there are and which of them are targets. Which
sample is when is the order's business (`workers.data`), and no file of a source is ever whole in memory.

- `documents`: text files, JSON lines, Parquet, packed or not, as a stream of documents.
- `tokenizer`, `tokenizer_files`: one face for the libraries; they are imported when a job needs them.
- `template`, `chat`: conversations, and which of their tokens are answers.
- `corpus`, `token_file`, `token_cache`: tokens on disk, made once, checked by digest, bounded.
- `packing`, `text_samples`, `objectives`: samples; next tokens, masked tokens, spans.
- `vocabulary`: whether a model takes the ids.
"""
