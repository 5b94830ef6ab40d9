"""The rows of a unit as records: of text files (a file is a row), of JSON lines, of row groups of Parquet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import MOST_ROW_BYTES, SourceUnit
from schemas.errors import BadData
from workers.data.kinds.file_formats import HEAD_BYTES, format_of
from workers.data.source_files import SourceFile, find_file
from workers.data.text.documents import PACKED, half_surrogate, unpacked
from workers.data.text.tokenizer_files import library

Record = dict[str, Any]
"""Name → value."""
RowFormat = Literal["text", "jsonl", "parquet"]

_PIECE_BYTES = 1 << 20
_ROWS = 256
_PACKED_FORMATS = frozenset({"gzip", "Zstandard", "bzip2", "xz"})


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a row is: its number, from 1, behind `start` bytes of a file."""

    file: SourceFile
    number: int = 0
    start: int = 0
    row: str = "line"

    def __str__(self) -> str:
        if not self.number:
            return self.file.name
        if not self.start:
            return f"{self.file.name}, {self.row} {self.number:,}"
        if self.file.local is None or self.row != "line":
            return f"{self.file.name}, {self.row} {self.number:,} behind byte {self.start:,}"
        return f"{self.file.name}, line {_lines_before(self.file, self.start) + self.number:,}"


class SourceRow(NamedTuple):
    """A row that is a record."""

    record: Record
    place: RowPlace


class BadRow(NamedTuple):
    """A row that is none, and why."""

    place: RowPlace
    reason: str


def version_of(file: SourceFile) -> str:
    """What tells a file's content from another's: size and etag, or a digest of its ends."""
    return file.identity().removeprefix(file.name).strip()


def row_format(name: str, spec: DataBuildSpec) -> RowFormat:
    """What a file's rows are, by the build's file or the file's name."""
    if spec.format != "auto":
        return spec.format
    name = plain_name(name)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    return "parquet" if name.endswith((".parquet", ".pq")) else "text"


def plain_name(name: str) -> str:
    """A file's name without the endings of packed files, in small letters."""
    name = name.casefold()
    for suffix in PACKED:
        name = name.removesuffix(suffix)
    return name


def is_packed(head: bytes) -> bool:
    """Whether a file with these first bytes is packed, so that only the whole of it can be read."""
    found = format_of(head)
    return found is not None and found[0] in _PACKED_FORMATS


class UnitReader:
    """Reads a unit's rows once, in order.

    Args:
        spec: The build.
        unit: What is read.
        fetched: `bus://` URL → file.

    Attributes:
        digest: Of all bytes that were read so far.

    Raises:
        BadData: A file is missing, or is not what it was when the build was planned.
    """

    def __init__(self, spec: DataBuildSpec, unit: SourceUnit, fetched: Mapping[str, Path] = {}) -> None:
        self._spec = spec
        self._unit = unit
        self._key = f"source[{unit.source}]"
        if unit.source >= len(spec.sources):
            raise BadData(f"{self._key}: the build has {len(spec.sources):,} sources")
        source = spec.sources[unit.source]
        self._files = [find_file(source, path, fetched, key=self._key) for path in unit.files]
        self.digest = hashlib.sha256()
        self._check_versions()

    def _check_versions(self) -> None:
        for file, version in zip(self._files, self._unit.versions, strict=True):
            if (now := version_of(file)) != version:
                raise BadData(
                    f"{self._key} {file.name} has changed since the build was planned ({now.split()[0]} "
                    f"bytes now, {version.split()[0]} then, or other content); build again"
                )

    def rows(self) -> Iterator[SourceRow | BadRow]:
        """All rows.

        Raises:
            BadData: A file is damaged, of another format, or was changed meanwhile.
            Unavailable: It can't be read now.
        """
        before = [_changed_at(file) for file in self._files]
        for file in self._files:
            kind = row_format(file.name, self._spec)
            head = file.head(HEAD_BYTES)
            self._check_format(file, kind, head)
            if kind == "parquet":
                yield from self._parquet(file)
            elif kind == "text":
                yield self._text(file)
            elif self._unit.stop:
                if is_packed(head):
                    raise BadData(
                        f"{self._key} {file.name} is packed, and its name does not say so; rename it, for "
                        f"example to {file.name}.gz, and build again"
                    )
                with file.open() as stream:
                    yield from self._lines(file, stream, hashed=True)
            else:
                self._hash(file)
                with unpacked(file) as stream:
                    yield from self._lines(file, stream, hashed=False)
        self._check_versions()
        if [_changed_at(file) for file in self._files] != before:
            raise BadData(f"{self._key}: files of it were changed while they were read; build again")

    def _check_format(self, file: SourceFile, kind: RowFormat, head: bytes) -> None:
        if kind == "parquet":
            if not head.startswith(b"PAR1"):
                raise BadData(f"{self._key} {file.name} is not a Parquet file")
            return
        if is_packed(head):
            with unpacked(file) as stream:
                head = stream.read(HEAD_BYTES)
        if found := format_of(head):
            what = "text" if kind == "text" else "JSON lines"
            raise BadData(
                f"{self._key} {file.name} is {found[0]}, not {what}; name the files that are meant by a "
                "pattern such as data/*.jsonl, or say format"
            )

    def _hash(self, file: SourceFile) -> None:
        with file.open() as stream:
            while piece := stream.read(_PIECE_BYTES):
                self.digest.update(piece)

    # --- a file is a row ---------------------------------------------------------------------------------
    def _text(self, file: SourceFile) -> SourceRow | BadRow:
        self._hash(file)
        with unpacked(file) as stream:
            content = stream.read(MOST_ROW_BYTES + 1)
        if len(content) > MOST_ROW_BYTES:
            raise BadData(f"{self._key} {too_long(file)}")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return BadRow(RowPlace(file), f"not UTF-8 at byte {error.start:,} ({error.reason})")
        record: Record = {}
        set_at(record, self._spec.field, text)
        return SourceRow(record, RowPlace(file))

    # --- JSON lines --------------------------------------------------------------------------------------
    def _lines(self, file: SourceFile, stream: BinaryIO, *, hashed: bool) -> Iterator[SourceRow | BadRow]:
        start, stop = self._unit.start, self._unit.stop
        position = start
        if start:  # a line that begins before the unit is another's
            stream.seek(start - 1)
            position += len(_line(stream, file)) - 1
        first = position
        number = 0
        while not stop or position < stop:
            line = _line(stream, file)
            if not line:
                return
            position += len(line)
            number += 1
            if hashed:
                self.digest.update(line)
            if line.isspace():
                continue
            yield _parsed(line, RowPlace(file, number, first))

    # --- Parquet -----------------------------------------------------------------------------------------
    def _parquet(self, file: SourceFile) -> Iterator[SourceRow | BadRow]:
        parquet = library("pyarrow.parquet", file.name, key=self._key)
        arrow = library("pyarrow", file.name, key=self._key)
        try:
            with unpacked(file) as stream:
                opened = parquet.ParquetFile(stream)
                groups = range(opened.num_row_groups)
                if self._unit.stop:
                    groups = range(self._unit.start, min(self._unit.stop, opened.num_row_groups))
                self._hash_groups(stream, opened.metadata, groups)
                before = sum(opened.metadata.row_group(group).num_rows for group in range(groups.start))
                number = before
                for batch in opened.iter_batches(
                    batch_size=_ROWS, row_groups=list(groups), use_threads=False
                ):
                    for record in batch.to_pylist():
                        number += 1
                        yield SourceRow(record, RowPlace(file, number, row="row"))
        except arrow.ArrowException as error:
            raise BadData(
                f"{self._key} {file.name} can't be read as Parquet: {str(error).splitlines()[0]}"
            ) from None

    def _hash_groups(self, stream: BinaryIO, metadata: Any, groups: Sequence[int]) -> None:
        for group in groups:
            facts = metadata.row_group(group)
            columns = [facts.column(number) for number in range(facts.num_columns)]
            for column in columns:
                first = column.data_page_offset
                if column.dictionary_page_offset is not None:
                    first = min(first, column.dictionary_page_offset)
                stream.seek(first)
                left = column.total_compressed_size
                while left and (piece := stream.read(min(left, _PIECE_BYTES))):
                    self.digest.update(piece)
                    left -= len(piece)


def too_long(file: SourceFile) -> str:
    """What is said of a text file that is no row."""
    return (
        f"{file.name} is one text of more than {MOST_ROW_BYTES >> 20} MiB, and a text file is one record; "
        "write a record a line (JSON lines), or cut it"
    )


def _line(stream: BinaryIO, file: SourceFile) -> bytes:
    line = stream.readline(MOST_ROW_BYTES)
    if len(line) == MOST_ROW_BYTES:
        raise BadData(f"{file.name} has a line of more than {MOST_ROW_BYTES >> 20} MiB; is it JSON lines?")
    return line


def _parsed(line: bytes, place: RowPlace) -> SourceRow | BadRow:
    is_first = place.number == 1 and not place.start
    array = f"{place.file.name} is one JSON array; write an object a line (JSON lines)"
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return BadRow(place, f"not UTF-8 at byte {error.start:,} of the line")
    except (ValueError, RecursionError) as error:
        if is_first and line.lstrip().startswith(b"["):
            raise BadData(array) from None
        return BadRow(place, f"not JSON ({getattr(error, 'msg', 'nested too deeply')})")
    if isinstance(record, dict):
        return SourceRow(record, place)
    if is_first and isinstance(record, list):
        raise BadData(array)
    return BadRow(place, "not a JSON object")


def _lines_before(file: SourceFile, stop: int) -> int:
    with file.open() as stream:
        found = 0
        while stop and (piece := stream.read(min(stop, _PIECE_BYTES))):
            found += piece.count(b"\n")
            stop -= len(piece)
        return found


def _changed_at(file: SourceFile) -> int:
    return file.local.stat().st_mtime_ns if file.local is not None else 0


# --- fields of a record ------------------------------------------------------------------------------------


class UnfitRecord(BadData):
    """A record that a step can't take: the row is what is bad, not the step."""


def get_at(record: Mapping[str, Any], field: str) -> Any:
    """A field's value; a dot goes deeper where no field has the whole name.

    Raises:
        UnfitRecord: There is no such field.
    """
    value: Any = record
    rest = field
    while True:
        if isinstance(value, Mapping) and rest in value:
            return value[rest]
        first, dot, rest = rest.partition(".")
        if not dot or not isinstance(value, Mapping) or first not in value:
            names = ", ".join(str(name) for name in list(record)[:12]) or "none"
            raise UnfitRecord(f"no field {field!r}, but {names}; say which holds it")
        value = value[first]


def text_of(record: Mapping[str, Any], field: str) -> str:
    """The record's text.

    Raises:
        UnfitRecord: It has none.
    """
    text = get_at(record, field)
    if not isinstance(text, str):
        found = "null" if text is None else type(text).__name__
        raise UnfitRecord(f"{field} is {found}, not a text")
    if broken := half_surrogate(text):
        raise UnfitRecord(broken)
    return text


def set_at(record: Record, field: str, value: Any) -> None:
    """Sets a field where `get_at` finds it; a new one is made at the top, or deeper by its dots."""
    first, dot, rest = field.partition(".")
    if field in record or not dot:
        record[field] = value
        return
    inner = record.get(first)
    inner = dict(inner) if isinstance(inner, Mapping) else {}
    set_at(inner, rest, value)
    record[first] = inner


def written(record: Record) -> bytes:
    """The record as a JSON line. Times become ISO 8601, exact decimals texts.

    Raises:
        UnfitRecord: A value is none of JSON's.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=_as_json)
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        raise UnfitRecord("a text of it has half a surrogate pair: no UTF-8 has it") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UnfitRecord(f"{error}; take the fields that you need by extract") from None


def _as_json(value: Any) -> Any:
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if type(value).__name__ == "Decimal":
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of it is {type(value).__name__}, which JSON does not have")
