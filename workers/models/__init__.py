"""Model factories that come with DMSC; users name their own as `module:factory` in the job file.

A factory returns an `nn.Sequential` that can be cut behind any layer. `workers.compute.model` calls it in the
analysis and in each stage. Nothing here knows stages or jobs.

- `gpt`: the byte-level GPT of the examples.
- `hugging_face`: Llama and GPT-2 from transformers.
- `padded`: the GPT on emulated devices, for benchmarks.
"""
