"""Small tokenizers and sources of text, made in a moment."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from schemas.job_file.data import SourceSpec
from workers.data.samples import Opening
from workers.data.text.objectives import MaskedSamples, SpanSamples
from workers.data.text.opening import open_text
from workers.data.text.text_samples import TextSamples

IndexedSamples = TextSamples | MaskedSamples | SpanSamples
EOS, PAD, MASK = "<|endoftext|>", "<pad>", "[MASK]"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def bpe(vocabulary: int = 400) -> str:
    """A byte-level BPE tokenizer.json, trained on this file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [EOS, PAD, MASK, "<|im_start|>", "<|im_end|>", *(f"<extra_id_{each}>" for each in range(20))]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([__file__], trainer)
    return str(tokenizer.to_str())


def saved_bpe(folder: Path, vocabulary: int = 400) -> str:
    """The path of such a tokenizer."""
    path = folder / "tokenizer.json"
    path.write_text(bpe(vocabulary))
    return str(path)


def lines(path: Path, rows: Iterable[Any]) -> str:
    """A file of JSON lines; its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def text_source(source: Path | str, **fields: Any) -> SourceSpec:
    """A source of kind text, of bytes unless it names a tokenizer."""
    document = {"kind": "text", "source": str(source), "sample_tokens": 8} | fields
    return SourceSpec.model_validate(document)


def opened(source: Path | str, spool: Path, **fields: Any) -> IndexedSamples:
    """Its samples; the tokens lie below `spool`."""
    spool.mkdir(exist_ok=True)
    found = open_text(text_source(source, **fields), Opening("data", 0, spool))
    assert isinstance(found, IndexedSamples)
    return found
