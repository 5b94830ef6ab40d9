"""What a user may get wrong: each is one line that says what, where, and what to do."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from bus.files.artifacts import open_artifacts
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import StoredObject, UnitOrder, UnitResult
from schemas.errors import BadData
from tests.builders.data_sets import LocalBuild
from workers.data_builds import run_unit
from workers.data_builds.stores import ArtifactUnitStore, FolderUnitStore

Build = Callable[..., LocalBuild]

GOOD = b'{"text": "good", "q": 1}\n'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{broken\n", "line 3: not JSON"),
        (b"[1]\n", "line 3: not a JSON object"),
        (b'{"text": "\xff"}\n', "line 3: not UTF-8 at byte 10 of the line"),
        (b'{"q": 2}\n', "line 3: no field 'text', but q; say which holds it"),
        (b'{"text": 7, "q": 2}\n', "line 3: text is int, not a text"),
        (b'{"text": null, "q": 2}\n', "line 3: text is null, not a text"),
        (b'{"text": "\\ud800", "q": 2}\n', "line 3: half a surrogate pair at character 0"),
        (b'{"text": "x", "q": "y"}\n', "line 3: q is str, not a number"),
        (b"[" * 100_000 + b"\n", "line 3: not JSON"),
    ],
)
def test_a_bad_row_stops_its_unit_or_is_counted(
    build: Build, tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD * 2 + line + b"\n" + GOOD)
    steps = [{"function": "clean"}, {"function": "score", "args": {"field": "q", "min": 0}}]
    with pytest.raises(
        BadData, match=f"rows.jsonl, {reason}.*; on_bad_row: drop leaves such rows"
    ) as refused:
        build(source=str(path), steps=steps)
    assert "\n" not in str(refused.value)
    done = build(source=str(path), steps=steps, on_bad_row="drop")
    assert done.content.dropped == {"unreadable": 1}
    assert done.content.rows_in == 4
    assert len(done.lines()) == 3


def test_a_line_is_counted_from_the_files_begin_in_any_unit(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD * 200 + b"{broken\n" + GOOD * 200)
    for unit_bytes in (1024, 1031, 2000, 1 << 20):
        with pytest.raises(BadData, match=r"rows.jsonl, line 201: not JSON"):
            build(source=str(path), unit_bytes=unit_bytes)


def test_a_text_file_that_is_no_text(build: Build, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good")
    (tmp_path / "b.txt").write_bytes(b"bad \xff")
    with pytest.raises(BadData, match=r"b.txt: not UTF-8 at byte 4 \(invalid start byte\)"):
        build(source=str(tmp_path / "*.txt"))
    assert build(source=str(tmp_path / "*.txt"), on_bad_row="drop").lines() == [{"text": "good"}]


def _jsonl(folder: Path, content: bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "fields", "reason"),
    [
        ("rows.jsonl", b'[\n{"text": "a"}]\n', {}, "is one JSON array; write an object a line"),
        ("rows.jsonl", b"PAR1xxxx", {}, "is Parquet, not JSON lines; name the files that are meant"),
        ("rows.parquet", b"nothing", {}, "is not a Parquet file"),
        ("rows.parquet", b"PAR1nothing PAR1", {}, "can't be read as Parquet"),
        ("rows.jsonl.gz", gzip.compress(GOOD * 99, mtime=0)[:-9], {}, "rows.jsonl.gz is damaged"),
        ("rows.txt", b"\x89PNG\r\n\x1a\n", {}, "is PNG, not text"),
        ("rows.jsonl", b"", {}, "is empty: of 0 rows none is left for training; dropped: none"),
        (
            "rows.jsonl",
            GOOD * 5,
            {"steps": [{"function": "length", "args": {"min_words": 2}, "reason": "tiny"}]},
            "is empty: of 5 rows none is left for training; dropped: tiny 5",
        ),
        (
            "rows.jsonl",
            GOOD * 5,
            {
                "steps": [
                    {"function": "tokenize", "tokenizer": "bytes"},
                    {"function": "pack", "args": {"sample_tokens": 64}},
                ]
            },
            "has no window for training: 20 tokens are less than one each group; give more data",
        ),
        (
            "rows.jsonl",
            GOOD,
            {"source": "dataset://x@1"},
            "a build reads files, no data sets; name what that",
        ),
        ("rows.jsonl", GOOD, {"source": "/nowhere/x.jsonl"}, r"source\[0\] /nowhere/x.jsonl does not exist"),
        (
            "rows.jsonl",
            GOOD,
            {"steps": [{"function": "tokenize", "tokenizer": "/nowhere/tokenizer.json"}]},
            r"steps\[0\] tokenize: tokenizer /nowhere/tokenizer.json does not exist on this node",
        ),
    ],
)
def test_a_source_that_is_another_thing(
    build: Build, tmp_path: Path, name: str, content: bytes, fields: dict[str, Any], reason: str
) -> None:
    path = _jsonl(tmp_path, content, name)
    with pytest.raises(BadData, match=reason) as refused:
        build(**{"source": str(path), **fields}).content  # noqa: B018  # some are found when it is assembled
    assert "\n" not in str(refused.value)


def test_files_of_several_kinds(build: Build, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    _jsonl(folder, GOOD)
    (folder / "README.md").write_text("about it")
    with pytest.raises(BadData, match=r"holds files of several kinds, as README.md \(text\), rows.jsonl"):
        build(source=str(folder))
    assert len(build(source=str(folder / "*.jsonl")).lines()) == 1


def test_a_packed_file_whose_name_does_not_say_so(build: Build, tmp_path: Path) -> None:
    path = _jsonl(tmp_path, gzip.compress(os.urandom(4000).hex().encode(), 0))
    done = DataBuildSpec(name="x", source=str(path), unit_bytes=1024)
    plan = run_unit(done, UnitOrder(phase="plan"), FolderUnitStore(tmp_path / "objects"))
    assert len(plan.units) == 1  # read as a whole
    small = _jsonl(tmp_path, gzip.compress(GOOD * 3), "small.jsonl")
    assert len(build(source=str(small)).lines()) == 3


def test_too_many_units(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.data_builds.planning.MOST_UNITS", 3)
    path = _jsonl(tmp_path, GOOD * 400)
    with pytest.raises(BadData, match="would have more than 3 units; say unit_bytes: 6666 or more"):
        build(source=str(path), unit_bytes=1024)
    assert len(build(source=str(path), unit_bytes=6666).plan.units) <= 3


def test_a_value_that_json_does_not_have(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"text": ["a"], "blob": [b"\x00"], "n": [1]})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(BadData, match="row 1: a value of it is bytes, which JSON does not have; take"):
        build(source=str(path))
    steps = [{"function": "extract", "args": {"fields": ["text", "n"]}}]
    assert build(source=str(path), steps=steps).lines() == [{"text": "a", "n": 1}]


# --- what changes under a build ----------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["longer", "other", "gone"])
def test_a_source_that_has_changed_since_the_plan_stops_the_unit(tmp_path: Path, change: str) -> None:
    path = _jsonl(tmp_path, GOOD * 100)
    spec = DataBuildSpec(name="x", source=str(path), unit_bytes=1024)
    store = FolderUnitStore(tmp_path / "objects")
    plan = run_unit(spec, UnitOrder(phase="plan"), store)
    order = UnitOrder(phase="records", index=1, unit=plan.units[1])
    before = run_unit(spec, order, store)
    content = path.read_bytes()
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(content + GOOD if change == "longer" else content.replace(b"good", b"gooD"))
    with pytest.raises(BadData) as refused:
        run_unit(spec, order, store)
    expected = "is not there, or no longer" if change == "gone" else "has changed since the build was planned"
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)
    path.write_bytes(content)
    assert run_unit(spec, order, store) == before


def test_a_damaged_output_of_a_unit_is_named(tmp_path: Path) -> None:
    path = _jsonl(tmp_path, GOOD * 10)
    spec = DataBuildSpec(name="x", source=str(path))
    store = FolderUnitStore(tmp_path / "objects")
    plan = run_unit(spec, UnitOrder(phase="plan"), store)
    records = run_unit(spec, UnitOrder(phase="records", unit=plan.units[0]), store)
    stored = tmp_path / "objects" / records.outputs["records"].name
    stored.write_bytes(stored.read_bytes().replace(b"good", b"gooD"))
    with pytest.raises(BadData, match=r"holds other bytes .* it was changed or damaged"):
        run_unit(spec, UnitOrder(phase="pack", inputs=(records,)), store)
    stored.unlink()
    with pytest.raises(BadData, match=f"has no {records.outputs['records'].name}; build again"):
        run_unit(spec, UnitOrder(phase="pack", inputs=(records,)), store)


async def test_units_keep_their_outputs_at_any_url(tmp_path: Path) -> None:
    path = _jsonl(tmp_path, GOOD * 10)
    spec = DataBuildSpec(name="x", source=str(path))
    artifacts = open_artifacts(str(tmp_path / "at-a-url"), None)
    loop = asyncio.get_running_loop()

    def store(name: str) -> ArtifactUnitStore:
        (tmp_path / name).mkdir()
        return ArtifactUnitStore(artifacts, tmp_path / name, loop)

    plan = await asyncio.to_thread(run_unit, spec, UnitOrder(phase="plan"), store("a"))
    order = UnitOrder(phase="records", unit=plan.units[0])
    records = await asyncio.to_thread(run_unit, spec, order, store("b"))
    pack = UnitOrder(phase="pack", inputs=(records,))
    packed = await asyncio.to_thread(run_unit, spec, pack, store("c"))
    assert packed == await asyncio.to_thread(run_unit, spec, pack, store("d"))
    written = await artifacts.get_bytes(packed.outputs["train"].name)
    assert written.decode().splitlines() == [json.dumps({"text": "good", "q": 1}, separators=(",", ":"))] * 10
    missing = StoredObject(sha256="0" * 64, bytes=1)
    with pytest.raises(BadData, match="has no 00/0000"):
        await asyncio.to_thread(store("e").open, missing)


# --- the file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"function": "lenght"}, "'lenght' is none of clean, length"),
        ({"function": "length"}, "it bounds nothing; give one of min_characters"),
        (
            {"function": "length", "args": {"min_chars": 3}},
            "length has no argument 'min_chars'; it has: min",
        ),
        (
            {"function": "length", "args": {"min_words": 5, "max_words": 4}},
            "max_words 4 is less than min",
        ),
        ({"function": "score", "args": {"min": 1}}, "score needs the argument 'field'"),
        ({"function": "score", "args": {"field": "q"}}, "it bounds nothing; give min, max or both"),
        ({"function": "extract"}, "extract needs the argument 'fields'"),
        (
            {"function": "near_duplicates", "args": {"bands": 7}},
            "128 permutations are no multiple of 7",
        ),
        (
            {"function": "near_duplicates", "args": {"threshold": 1.5}},
            "near_duplicates: threshold: .*less",
        ),
        ({"function": "exact_duplicates", "args": {"by": "x"}}, "has no argument 'by'; it has: none"),
        (
            {"function": "pack", "args": {"sample_tokens": 1}},
            "pack: sample_tokens: .*or equal to 2",
        ),
        ({"function": "tokenize"}, "tokenize needs tokenizer"),
        ({"function": "clean", "tokenizer": "bytes"}, "tokenizer is for tokenize"),
        ({"function": "os:system"}, "os is a module of Python itself"),
    ],
)
def test_a_wrong_step_is_refused_with_the_file(step: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        DataBuildSpec.model_validate({"name": "x", "source": "y", "steps": [step]})


def test_books_that_do_not_close_are_no_result() -> None:
    with pytest.raises(ValidationError, match="pack unit 3: 5 rows came in, and 4 are accounted for"):
        UnitResult(phase="pack", index=3, rows_in=5, kept={"train": 3}, dropped={"again": 1})
