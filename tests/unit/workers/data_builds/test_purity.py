"""The digest is a function of the sources and the file: no order, repetition or cut of units shows in it."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.builders.data_sets import LocalBuild, made_up_texts, write_lines

Build = Callable[..., LocalBuild]

TOKENS: list[dict[str, Any]] = [
    {"function": "tokenize", "tokenizer": "bytes", "args": {"eos": "<eos>"}},
    {"function": "pack", "args": {"sample_tokens": 32}},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = list(made_up_texts(300, seed=1))
    texts += texts[40:90]  # equal ones, far apart
    return write_lines(tmp_path / "corpus.jsonl", [{"n": n, "text": text} for n, text in enumerate(texts)])


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("content", ["records", "documents", "windows"])
def test_no_order_and_no_repetition_of_units_shows_in_the_digest(
    build: Build, corpus: Path, content: str, seed: int
) -> None:
    ends = {"records": [], "documents": TOKENS[:1], "windows": TOKENS}[content]
    fields = {
        "source": str(corpus),
        "unit_bytes": 4096,
        "steps": [{"function": "clean"}, {"function": "near_duplicates"}, *ends],
        "validation_fraction": 0.2,
    }
    once = build(**fields)
    shuffled = build({"seed": seed, "attempts": 2}, **fields)
    assert len(once.plan.units) > 5
    assert shuffled.content == once.content
    assert shuffled.content.digest == once.content.digest
    assert once.content.dropped == {"near_duplicates": 50}


def test_books_close_in_each_unit_and_in_all(build: Build, corpus: Path) -> None:
    done = build(
        source=str(corpus),
        unit_bytes=4096,
        steps=[
            {"function": "length", "args": {"min_words": 20}, "reason": "short"},
            {"function": "exact_duplicates"},
            {"function": "length", "args": {"max_words": 50}, "reason": "long"},
            *TOKENS,
        ],
        validation_fraction=0.3,
    )
    for result in (*done.records, *done.duplicates, *done.packs):
        assert result.rows_in == sum(result.kept.values()) + sum(result.dropped.values())
    content = done.content
    assert content.rows_in == 350 == sum(content.kept.values()) + sum(content.dropped.values())
    assert set(content.dropped) == {"short", "exact_duplicates", "long"}
    assert all(content.dropped.values())
    assert set(content.kept) == {"train", "validation"}
    for split in content.splits:
        assert len(done.samples(split)) == content.rows(split)


def test_cuts_change_no_rows(build: Build, corpus: Path) -> None:
    fields = {"source": str(corpus), "steps": [{"function": "near_duplicates"}], "validation_fraction": 0.2}
    whole = build(**fields)
    assert len(whole.plan.units) == 1
    for unit_bytes in (1024, 1500, 4001, 20_000):
        cut = build({"parts": 3}, **fields, unit_bytes=unit_bytes, group_units=3)
        assert len(cut.plan.units) > 1
        for split in ("train", "validation"):
            assert cut.lines(split) == whole.lines(split)
        assert cut.content.dropped == whole.content.dropped


def test_each_byte_at_which_lines_may_be_cut_gives_each_row_once(build: Build, tmp_path: Path) -> None:
    rows = [{"text": "x" * length} for length in (1, 0, 700, 3, 900, 1100, 2, 2)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    size = path.stat().st_size
    for unit_bytes in range(1024, size, 7):
        assert build(source=str(path), unit_bytes=unit_bytes).lines() == rows
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # without a last line end
    assert build(source=str(path), unit_bytes=1024).lines() == rows


def test_one_corpus_in_each_format_gives_the_same_samples(build: Build, tmp_path: Path) -> None:
    texts = list(made_up_texts(60, seed=4))
    rows = [{"text": text} for text in texts]
    jsonl = write_lines(tmp_path / "rows.jsonl", rows)
    sources = {"jsonl": jsonl}
    sources["gz"] = tmp_path / "rows.jsonl.gz"
    sources["gz"].write_bytes(gzip.compress(jsonl.read_bytes()))
    sources["zst"] = tmp_path / "rows.jsonl.zst"
    with pa.CompressedOutputStream(str(sources["zst"]), "zstd") as stream:
        stream.write(jsonl.read_bytes())
    sources["parquet"] = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pa.table({"text": texts}), sources["parquet"], row_group_size=7)
    sources["text"] = tmp_path / "texts"
    sources["text"].mkdir()
    for number, text in enumerate(texts):
        (sources["text"] / f"{number:03}.txt").write_text(text)
    for steps in ([], TOKENS[:1], TOKENS):
        fields = {"steps": steps, "unit_bytes": 1024, "group_units": 1000, "validation_fraction": 0.2}
        found = {name: build(source=str(path), **fields) for name, path in sources.items()}
        assert len(found["parquet"].plan.units) > 1
        assert len(found["text"].plan.units) > 1
        for split in ("train", "validation"):
            first = [shard.sha256 for shard in found["jsonl"].content.splits[split]]
            for done in found.values():
                assert [shard.sha256 for shard in done.content.splits[split]] == first
