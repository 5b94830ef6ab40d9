"""Documents of text, read in order and in pieces: of text files, JSON lines, a column of Parquet files."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from bus.wire.secret_urls import hidden
from schemas.errors import BadData, DmscError, Unavailable
from schemas.job_file.data import SourceSpec
from workers.data.kinds.file_formats import format_of
from workers.data.source_files import SourceFile
from workers.data.storage.retrying import passes
from workers.data.text.tokenizer_files import library

PIECE_CHARACTERS = 1 << 24
"""A longer document becomes tokens in pieces of about this size, each ending with a line if there is one.

So that no document is whole in memory. The number decides tokens at such a border: it must stay."""

_READ_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 28
_ROWS = 256
_SURROGATE = re.compile("[\ud800-\udfff]")

FileFormat = Literal["text", "jsonl", "parquet"]


_HEAD_BYTES = 512
PACKED = (".gz", ".zst", ".zstd", ".bz2", ".xz")
"""Endings of packed files' names. Which of them a file is, its first bytes say."""


class TextPiece(NamedTuple):
    """A piece of a document. `ends`: the document's last one."""

    text: str
    place: str
    ends: bool


class Row(NamedTuple):
    """A value of a JSON line or of a Parquet row, and the row's other values."""

    value: Any
    place: str
    others: dict[str, Any]


class BadDocument(NamedTuple):
    """A document that can't be read: where, and why."""

    place: str
    reason: str


def read_texts(files: Iterable[SourceFile], spec: SourceSpec) -> Iterator[TextPiece | BadDocument]:
    """All documents of a source, in order; a document comes as one or more pieces.

    Raises:
        BadData: A file is not what the job says, or can't be read.
    """
    for file in files:
        kind = file_format(file, spec)
        if kind == "text":
            yield from _read_text(file, spec)
            continue
        for row in read_rows(file, kind, spec.field or "text"):
            if isinstance(row, Row) and not isinstance(row.value, str):
                found = "null" if row.value is None else type(row.value).__name__
                yield BadDocument(row.place, f"{spec.field or 'text'} is {found}, not a text")
            elif isinstance(row, Row):
                yield from _cut(row)
            else:
                yield row


def _cut(row: Row) -> Iterator[TextPiece | BadDocument]:
    text: str = row.value
    if broken := half_surrogate(text):
        yield BadDocument(row.place, broken)
        return
    while len(text) > PIECE_CHARACTERS:
        end = _border(text)
        yield TextPiece(text[:end], row.place, False)
        text = text[end:]
    yield TextPiece(text, row.place, True)


def half_surrogate(text: str) -> str:
    """Where a text has what JSON may say and no UTF-8 has; empty: nowhere."""
    found = None if text.isascii() else _SURROGATE.search(text)
    return f"half a surrogate pair at character {found.start():,}: no UTF-8 has it" if found else ""


def _border(text: str) -> int:
    """Where to cut a text that is too long: behind its last line within the limit."""
    return text.rfind("\n", 0, PIECE_CHARACTERS) + 1 or PIECE_CHARACTERS


def file_format(file: SourceFile, spec: SourceSpec) -> FileFormat:
    """What a file is read as, by the job or by its name.

    Raises:
        BadData: It is something else.
    """
    head = first_bytes(file)
    kind = spec.format if spec.format != "auto" else _named_format(file)
    if kind == "text" and spec.format == "auto" and head.startswith(b"PAR1"):
        kind = "parquet"
    if kind == "parquet":
        if not head.startswith(b"PAR1"):
            raise BadData(f"{file.name} is not a Parquet file")
        return kind
    if found := format_of(head):
        what = "text" if kind == "text" else "JSON lines"
        raise BadData(f"{file.name} is {found[0]}, not {what}; {found[1]}")
    return kind


def _named_format(file: SourceFile) -> FileFormat:
    name = file.name.casefold()
    for suffix in PACKED:
        name = name.removesuffix(suffix)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    return "parquet" if name.endswith((".parquet", ".pq")) else "text"


def refuse_mixture(files: Iterable[SourceFile], spec: SourceSpec) -> None:
    """Refuses files of several kinds, as of a data set's folder with a README, unless the job says a format.

    Raises:
        BadData: There are some.
    """
    found: dict[str, str] = {}
    for file in files:
        found.setdefault(_named_format(file), file.name)
    if spec.format == "auto" and len(found) > 1:
        kinds = ", ".join(f"{name} ({kind})" for kind, name in found.items())
        raise BadData(
            f"data.source {spec.source} holds files of several kinds, as {kinds}; name those that are meant "
            "by a pattern such as data/*.parquet, or say data.format"
        )


def _read_text(file: SourceFile, spec: SourceSpec) -> Iterator[TextPiece | BadDocument]:
    """A text file as one document, or as those between its separators; no empty one behind the last."""
    decoder = codecs.getincrementaldecoder("utf-8-sig" if spec.encoding == "utf-8" else spec.encoding)()
    pending, number, offset, ends = "", 1, 0, False
    with unpacked(file) as stream:
        while not ends:
            content = stream.read(_READ_BYTES)
            ends = not content
            waiting = len(decoder.getstate()[0])
            try:
                pending += decoder.decode(content, final=ends)
            except UnicodeDecodeError as error:
                raise BadData(_undecodable(file, spec, offset - waiting + error.start, error)) from None
            offset += len(content)
            if spec.separator:
                *whole, pending = pending.split(spec.separator)
                for text in whole:
                    yield from _cut(Row(text, _place(file, number, spec), {}))
                    number += 1
            # a separator, or a line, may still follow the part that is kept back
            while len(pending) > PIECE_CHARACTERS + len(spec.separator):
                end = _border(pending)
                yield TextPiece(pending[:end], _place(file, number, spec), False)
                pending = pending[end:]
    if pending or not spec.separator:
        yield from _cut(Row(pending, _place(file, number, spec), {}))


def _place(file: SourceFile, number: int, spec: SourceSpec) -> str:
    return f"{file.name}, document {number}" if spec.separator else file.name


def _undecodable(file: SourceFile, spec: SourceSpec, offset: int, error: UnicodeDecodeError) -> str:
    return (
        f"{file.name} is not {spec.encoding} at byte {offset:,} ({error.reason}); "
        "convert it, or say data.encoding"
    )


# --- rows ------------------------------------------------------------------------------------------------


def read_rows(file: SourceFile, kind: Literal["jsonl", "parquet"], field: str) -> Iterator[Row | BadDocument]:
    """The values of a field of JSON lines, or of a column of a Parquet file.

    Raises:
        BadData: The file has no such field or column, or can't be read.
    """
    with unpacked(file) as stream:
        yield from (_read_parquet if kind == "parquet" else _read_lines)(file, stream, field)


def _read_lines(file: SourceFile, stream: BinaryIO, field: str) -> Iterator[Row | BadDocument]:
    seen = False
    number = 0
    while line := stream.readline(_MOST_LINE_BYTES):
        number += 1
        place = f"{file.name}, line {number:,}"
        if len(line) == _MOST_LINE_BYTES:
            raise BadData(f"{place} is longer than {_MOST_LINE_BYTES >> 20} MiB; is it JSON lines?")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            yield BadDocument(place, f"not UTF-8 at byte {error.start:,} of the line")
            continue
        except (ValueError, RecursionError) as error:
            if number == 1 and line.lstrip().startswith(b"["):
                raise BadData(f"{file.name} is one JSON array; write an object a line (JSON lines)") from None
            yield BadDocument(place, f"not JSON ({getattr(error, 'msg', 'nested too deeply')})")
            continue
        if not isinstance(row, dict):
            if number == 1 and isinstance(row, list):
                raise BadData(f"{file.name} is one JSON array; write an object a line (JSON lines)")
            yield BadDocument(place, "not a JSON object")
            continue
        found, value = _at(row, field)
        if not found and not seen:
            raise BadData(f"{place} has no field {field!r}, but {_listed(row)}; say data.field")
        if not found:
            yield BadDocument(place, f"no field {field!r}")
            continue
        seen = True
        yield Row(value, place, {key: other for key, other in row.items() if key != field})


def _at(row: dict[str, Any], field: str) -> tuple[bool, Any]:
    """Whether there is such a field, and its value; a dot goes deeper where no field has the whole name."""
    if field in row:
        return True, row[field]
    first, dot, rest = field.partition(".")
    if dot and isinstance(row.get(first), dict):
        return _at(row[first], rest)
    return False, None


def _read_parquet(file: SourceFile, stream: BinaryIO, field: str) -> Iterator[Row]:
    parquet = library("pyarrow.parquet", file.name, key="data.source")
    arrow = library("pyarrow", file.name, key="data.source")
    try:
        opened = parquet.ParquetFile(stream)
        names = opened.schema_arrow.names
        if field.partition(".")[0] not in names and field not in names:
            raise BadData(f"{file.name} has no column {field!r}, but {_listed(names)}; say data.field")
        column = field if field in names else field.partition(".")[0]
        number = 0
        for batch in opened.iter_batches(batch_size=_ROWS, columns=[column], use_threads=False):
            for value in batch.column(0).to_pylist():
                number += 1
                found, inner = _at({column: value}, field)
                yield Row(inner if found else None, f"{file.name}, row {number:,}", {})
    except arrow.ArrowException as error:
        raise BadData(f"{file.name} can't be read as Parquet: {str(error).splitlines()[0]}") from None


def _listed(names: Iterable[str]) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:12]) + (f" and {len(shown) - 12} others" if len(shown) > 12 else "") or "none"


# --- files -------------------------------------------------------------------------------------------------


@contextmanager
def unpacked(file: SourceFile) -> Iterator[BinaryIO]:
    """The content of a file that is gzip, zstd, bzip2, xz or neither.

    Raises:
        BadData: It is damaged, or can't be read.
        Unavailable: It can't be read now.
    """
    try:
        with file.open() as raw:
            head = raw.read(_HEAD_BYTES)
            raw.seek(0)
            with closing(_stream(file.name, raw, head)) as stream:
                yield stream
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise BadData(f"{file.name} is damaged: {error}") from None
    except OSError as error:
        reason = hidden(str(error.strerror or error))
        if "decompression failed" in reason:
            raise BadData(f"{file.name} is damaged: {reason}") from None
        if passes(error):
            raise Unavailable(f"{file.name} can't be read now: {reason}") from None
        raise BadData(f"{file.name} can't be read: {reason}") from None
    except Exception as error:  # of a store's driver
        if isinstance(error, DmscError) or not passes(error):
            raise
        raise Unavailable(f"{file.name} can't be read now: {hidden(str(error))}") from None


def first_bytes(file: SourceFile) -> bytes:
    """The first bytes of a file's content."""
    with unpacked(file) as stream:
        return stream.read(_HEAD_BYTES)


def _stream(name: str, raw: BinaryIO, head: bytes) -> BinaryIO:
    if head.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        pyarrow = library("pyarrow", f"{name} (zstd)", key="data.source")
        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")))
    if head.startswith(b"BZh"):
        return cast(BinaryIO, bz2.BZ2File(raw))
    if head.startswith(b"\xfd7zXZ\x00"):
        return cast(BinaryIO, lzma.LZMAFile(raw))
    return raw
