"""A tokenizer that is larger than the model's vocabulary is found at submission, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from schemas.errors import BadModel
from schemas.task_graph import LayerProfile, TensorSchema
from tests.builders import jobs
from tests.builders.text import lines, saved_bpe
from workers.data.opening import open_source
from workers.data.text.vocabulary import check_logits, embeddings_checked
from workers.tasks.analysis import analyse

ROWS = [{"text": "a text of which no token is rare " * 20}]


async def analysed(folder: Path, vocabulary: int, **data: object) -> object:
    source = lines(folder / "rows.jsonl", ROWS)
    section = {"kind": "text", "source": source, "tokenizer": saved_bpe(folder), "sample_tokens": 8}
    spec = jobs.spec(model=jobs.gpt(vocabulary=vocabulary), data=section | data)
    opened = await open_source(spec, None)
    try:
        return analyse("job", spec, opened, "cluster", "node")
    finally:
        opened.close()


async def test_a_vocabulary_that_is_too_small(tmp_path: Path) -> None:
    with pytest.raises(
        BadModel, match=r"embeds 399 ids, and the tokenizer has ids up to 399; give .* at least 400"
    ):
        await analysed(tmp_path, 399)


async def test_one_that_suffices(tmp_path: Path) -> None:
    assert await analysed(tmp_path, 400)
    assert await analysed(tmp_path, 512, validation_fraction=0)


def test_a_position_is_no_id() -> None:
    """The model's embedding of positions is smaller than the vocabulary, and may be."""
    batch = {"inputs": torch.zeros(2, 8, dtype=torch.int64)}
    model = nn.ModuleDict({"ids": nn.Embedding(5, 2), "positions": nn.Embedding(8, 2)})
    with embeddings_checked(9, model, batch):
        model["positions"](torch.arange(8))
        with pytest.raises(BadModel, match="layer ids embeds 5 ids, and the tokenizer has ids up to 8"):
            model["ids"](batch["inputs"])
    model["ids"](batch["inputs"])


def test_logits_that_are_fewer_than_the_ids() -> None:
    output = TensorSchema(shape=(8, 5), dtype="float32")
    sizes = {"parameters": 1, "parameter_bytes": 4, "forward_ms": 1.0, "backward_ms": 1.0}
    last = LayerProfile(
        index=0, name="head", kind="Linear", activation_bytes=0, output=(output,), output_bytes=160, **sizes
    )
    check_logits(5, [last])
    check_logits(None, [last])
    with pytest.raises(BadModel, match="layer head gives 5 logits, and the tokenizer has ids up to 5; give"):
        check_logits(6, [last])
