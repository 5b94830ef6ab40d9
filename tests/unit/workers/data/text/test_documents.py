"""Documents come in order, whatever their file is packed in, and what is none is named by its place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from schemas.errors import BadData
from tests.builders.text import lines, opened, text_source
from workers.data.source_files import list_files
from workers.data.text import documents
from workers.data.text.documents import BadDocument, read_texts

ROWS = [{"text": "one", "n": 1}, {"text": "zwei ½", "n": 2}, {"text": "", "n": 3}]


def texts(source: Path | str, **fields: Any) -> list[str]:
    """Whole documents; of one that can't be read, where and why."""
    found = [""]
    for piece in read_texts(list_files(str(source)), text_source(source, **fields)):
        if isinstance(piece, BadDocument):
            found[-1] = f"{piece.place}: {piece.reason}"
            found.append("")
            continue
        found[-1] += piece.text
        if piece.ends:
            found.append("")
    return found[:-1]


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.compress(content, codec="zstd", asbytes=True))


def test_each_file_of_a_folder_is_a_document(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden"):
        (tmp_path / name).write_text(f"{name}\r\n")
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    assert texts(tmp_path) == ["a.txt\r\n", "b.txt\r\n", "with a mark"]
    assert texts(f"{tmp_path}/[bc].txt") == ["b.txt\r\n", "with a mark"]


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_a_separator_may_lie_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(documents, "_READ_BYTES", block)
    (tmp_path / "a.txt").write_text("größer<|end|>zwei<|end|>")
    assert texts(tmp_path / "a.txt", separator="<|end|>") == ["größer", "zwei"]
    assert texts(tmp_path / "a.txt", separator="<|") == ["größer", "end|>zwei", "end|>"]


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_a_long_document_comes_in_the_same_pieces_whatever_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(documents, "_READ_BYTES", block)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 20)
    whole = "0123456789\n" * 5 + "x" * 50
    (tmp_path / "a.txt").write_text(f"{whole};{whole}")
    pieces = [
        piece
        for piece in read_texts(list_files(str(tmp_path)), text_source(tmp_path, separator=";"))
        if not isinstance(piece, BadDocument)
    ]
    assert "".join(piece.text for piece in pieces) == whole * 2
    assert [len(piece.text) for piece in pieces] == [11, 11, 11, 11, 11, 20, 20, 10] * 2
    assert [piece.ends for piece in pieces] == [*[False] * 7, True] * 2


@pytest.mark.parametrize(
    "packed",
    [bytes, gzip.compress, bz2.compress, lzma.compress, zstd],
    ids=["plain", "gz", "bz2", "xz", "zst"],
)
def test_json_lines_may_be_packed(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    content = "\n".join(map(json.dumps, ROWS)).encode()
    (tmp_path / "rows.jsonl.any").write_bytes(packed(content))
    assert texts(tmp_path, format="jsonl") == ["one", "zwei ½", ""]
    assert texts(tmp_path, format="jsonl", field="n")[0].endswith(
        "rows.jsonl.any, line 1: n is int, not a text"
    )


def test_parquet_gives_what_json_lines_give(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*ROWS, {"text": None}]), path)
    assert texts(path)[:3] == texts(lines(tmp_path / "rows.jsonl", ROWS))
    assert texts(path)[3].endswith("rows.parquet, row 4: text is null, not a text")


def test_a_field_may_lie_deeper(tmp_path: Path) -> None:
    rows = [{"a": {"b": "deep"}}, {"a.b": "flat"}, {"a": 1}]
    path = lines(tmp_path / "rows.jsonl", rows)
    assert texts(path, field="a.b") == ["deep", "flat", "rows.jsonl, line 3: no field 'a.b'"]


def test_lines_that_are_none_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n\nnope\n[1]\n{"text": "\xff"}\n{"text": "\\ud800"}\n{"text": "b"}\n')
    found = texts(path)
    assert found[0] == "a"
    assert found[1].startswith("rows.jsonl, line 3: not JSON")
    assert found[2] == "rows.jsonl, line 4: not a JSON object"
    assert found[3] == "rows.jsonl, line 5: not UTF-8 at byte 10 of the line"
    assert found[4].startswith("rows.jsonl, line 6: half a surrogate pair at character 0")
    assert found[5] == "b"


@pytest.mark.parametrize(
    ("name", "content", "fields", "expected"),
    [
        ("a.txt", b"PAR1....", {"format": "text"}, "a.txt is Parquet, not text; say data.kind: table"),
        ("a.txt", b"%PDF-1.7", {}, "a.txt is PDF, not text; take the text"),
        ("a.jsonl", b"\x89PNG\r\n", {}, "a.jsonl is PNG, not JSON lines"),
        (
            "a.txt",
            b"abc\xff",
            {},
            r"a.txt is not utf-8 at byte 3 \(invalid start byte\); convert it, or say data",
        ),
        ("a.parquet", b"text", {}, "a.parquet is not a Parquet file"),
        ("a.parquet", b"PAR1 and no more", {}, "a.parquet can't be read as Parquet"),
        ("a.jsonl", b'{"body": "x"}', {}, "line 1 has no field 'text', but body; say data.field"),
        ("a.json", b'[{"text": "x"}]', {}, "a.json is one JSON array; write an object a line"),
        ("a.txt.gz", gzip.compress(b"abc" * 999, mtime=0)[:-9], {}, "a.txt.gz is damaged"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, name: str, content: bytes, fields: dict[str, str], expected: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=expected) as caught:
        texts(tmp_path / name, **fields)
    assert "\n" not in caught.value.text


def test_a_column_that_is_missing_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    with pytest.raises(BadData, match=r"has no column 'body', but text, n; say data.field"):
        texts(path, field="body")


def test_other_encodings(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("größer".encode("latin-1"))
    assert texts(tmp_path, encoding="latin-1") == ["größer"]
    (tmp_path / "a.txt").write_bytes("größer".encode("utf-16"))
    assert texts(tmp_path, encoding="utf-16") == ["größer"]
    with pytest.raises(ValueError, match="klingon is no encoding that Python knows"):
        text_source(tmp_path, encoding="klingon")


def test_a_folder_of_several_kinds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("not meant")
    lines(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(
        BadData, match=r"several kinds, as README.md \(text\), rows.jsonl \(jsonl\); name those"
    ):
        opened(tmp_path, tmp_path / "spool")
    assert len(opened(f"{tmp_path}/*.jsonl", tmp_path / "spool", sample_tokens=4)) == 2
