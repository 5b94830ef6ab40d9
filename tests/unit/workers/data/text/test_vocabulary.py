"""A tokenizer that is larger than the model's vocabulary is found at submission, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import BadModel
from tests.builders import jobs
from tests.builders.text import lines, saved_bpe
from workers.data.opening import open_source
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
