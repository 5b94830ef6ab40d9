"""Kind `table`: columns of CSV, JSON lines and Parquet files as named tensors, by pyarrow.

The columns that the job names are read once, part by part, into arrays of a fixed width per row: in memory as
long as they are small, else in files that are mapped. So a row, or many at once, is one access, whatever the
format was; and only one part of a file is in memory while it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bus.logs import get_logger
from schemas.errors import BadData
from schemas.job_file.data import SourceSpec
from workers.data.data_set.record_files import files_of
from workers.data.kinds.decoding import library, seed_generators
from workers.data.kinds.file_formats import HEAD_BYTES, format_of
from workers.data.samples import Opening, Samples
from workers.data.source_files import SourceFile, files_digest
from workers.user_code import describe, load

log = get_logger("data")

IN_MEMORY_BYTES = 1 << 28
"""Columns up to this size stay in memory; larger ones are written into the spool and mapped."""

ROWS_AT_ONCE = 1 << 16
_JSON_LINES = (".jsonl", ".ndjson")

Array = NDArray[Any]


class TableSamples:
    """Rows of a table.

    Args:
        columns: Name of a batch → (rows, …).
        digest: Of the data.
    """

    def __init__(self, columns: Mapping[str, Array], digest: str) -> None:
        self._columns = dict(columns)
        self._rows = len(next(iter(columns.values())))
        self.digest = digest

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {name: torch.from_numpy(np.array(column[index])) for name, column in self._columns.items()}

    def gather(self, indices: Sequence[int]) -> Mapping[str, Any]:
        rows = np.asarray(indices)
        return {name: torch.from_numpy(column[rows]) for name, column in self._columns.items()}

    def close(self) -> None:
        self._columns = {}


class TransformedSamples:
    """Samples after the user's function, which runs under generators that are seeded for each sample."""

    def __init__(self, samples: Samples, transform: str, key: str) -> None:
        self._samples, self._key, self._name = samples, key, transform
        self._transform = load(transform)
        self.digest = samples.digest

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.draw(index, None)

    def draw(self, index: int, seed: int | None) -> Mapping[str, Any]:
        sample = self._samples[index]
        seed_generators(index if seed is None else seed)
        try:
            made = self._transform(dict(sample))
        except Exception as error:  # user code may raise anything
            raise BadData(f"{self._key}.transform {self._name} failed: {describe(error)}") from error
        if not isinstance(made, Mapping):
            raise BadData(
                f"{self._key}.transform {self._name} returned a {type(made).__name__}; it must return a "
                "mapping of names, as it gets one"
            )
        return made

    def close(self) -> None:
        self._samples.close()


def open_table(spec: SourceSpec, opening: Opening) -> Samples:
    """Kind table: all columns as inputs, or those that `columns` names.

    Raises:
        BadData: A file is of another format, a column is missing, or has values that make no tensor.
    """
    key = f"{opening.at}.source"
    library("pyarrow", "table", opening.at)
    files = files_of(spec, opening, (".parquet", ".pq", ".csv", ".tsv", *_JSON_LINES))
    readers = [_TableFile(file, f"{key} {file.name}") for file in files]
    wanted = _wanted(spec, readers, opening.at)
    parts: dict[str, _ColumnBuilder] = {
        name: _ColumnBuilder(
            opening.spool / f"{number}.column", f"{opening.at}.columns: {name}", spec.dtypes.get(name)
        )
        for number, name in enumerate(wanted)
    }
    types = {each: spec.dtypes.get(name) for name, columns in wanted.items() for each in columns}
    for reader in readers:
        for batch in reader.batches(types):
            for name, made_of in wanted.items():
                parts[name].add([(each, batch.column(each)) for each in made_of], _is_list(spec, name))
    columns = {name: part.array() for name, part in parts.items()}
    samples: Samples = TableSamples(columns, files_digest(files))
    return samples if spec.transform is None else TransformedSamples(samples, spec.transform, opening.at)


def _is_list(spec: SourceSpec, name: str) -> bool:
    """Whether a name is made of a list of columns, so that it has a dimension for them."""
    return not isinstance(spec.columns.get(name, ()), str)


def _wanted(spec: SourceSpec, readers: Sequence[_TableFile], at: str) -> dict[str, tuple[str, ...]]:
    there = readers[0].names
    for reader in readers[1:]:
        if reader.names != there:
            raise BadData(
                f"{reader.what} has other columns than {readers[0].what}: {', '.join(reader.names)}, not "
                f"{', '.join(there)}"
            )
    if not spec.columns:
        raise BadData(
            f"{at}.columns: say which columns make which tensor, for example "
            f"{{inputs: [{', '.join(there[:-1][:3])}], targets: {there[-1]}}}; there are {', '.join(there)}"
        )
    wanted = {name: (each,) if isinstance(each, str) else tuple(each) for name, each in spec.columns.items()}
    for name, columns in wanted.items():
        if not columns:
            raise BadData(f"{at}.columns.{name}: it names no column; there are {', '.join(there)}")
        for column in columns:
            if column not in there:
                raise BadData(
                    f"{at}.columns.{name}: there is no column {column!r} in {spec.source}; there are "
                    f"{', '.join(there)}"
                )
    return wanted


class _TableFile:
    """One file, part by part."""

    def __init__(self, file: SourceFile, what: str) -> None:
        self._file = file
        self.what = what
        head = file.head(HEAD_BYTES)
        found = format_of(head)
        self._is_parquet = head.startswith(b"PAR1")
        if found is not None and not self._is_parquet:
            raise BadData(
                f"{what} is {found[0]}, which kind table does not read; give CSV, JSON lines or Parquet"
            )
        with self._opened() as opened:
            self.names: list[str] = list(
                opened.schema_arrow.names if self._is_parquet else opened.schema.names
            )

    def batches(self, types: Mapping[str, str | None]) -> Iterable[Any]:
        """Parts of the columns of these names; a type that the job says is what a CSV's text is read as."""
        import pyarrow as pa

        with self._opened(types) as opened:
            try:
                if self._is_parquet:
                    yield from opened.iter_batches(ROWS_AT_ONCE, columns=list(types))
                else:
                    yield from opened
            except pa.ArrowInvalid as error:
                raise BadData(f"{self.what} can't be read: {_line(error)}") from None

    def _opened(self, types: Mapping[str, str | None] = {}) -> Any:
        import pyarrow as pa
        from pyarrow import csv, json, parquet

        try:
            if self._is_parquet:
                return parquet.ParquetFile(self._file.open())
            if self._file.name.lower().endswith(_JSON_LINES):
                return json.open_json(
                    pa.PythonFile(self._file.open()), read_options=json.ReadOptions(block_size=1 << 22)
                )
            separator = "\t" if self._file.name.lower().endswith(".tsv") else ","
            return csv.open_csv(
                pa.PythonFile(self._file.open()),
                read_options=csv.ReadOptions(block_size=1 << 22),
                convert_options=csv.ConvertOptions(
                    include_columns=list(types),
                    column_types={
                        name: pa.float32() if "float" in kind else pa.type_for_alias(kind)
                        for name, kind in types.items()
                        if kind is not None
                    },
                ),
                parse_options=csv.ParseOptions(delimiter=separator),
            )
        except pa.ArrowInvalid as error:
            raise BadData(f"{self.what} can't be read: {_line(error)}") from None


class _ColumnBuilder:
    """One tensor's values of all rows, while they are read."""

    def __init__(self, path: Path, what: str, dtype: str | None) -> None:
        self._path, self._what, self._dtype = path, what, dtype
        self._parts: list[Array] = []
        self._bytes = 0
        self._rows = 0
        self._spilled: Any = None
        self._shape: tuple[int, ...] | None = None
        self._kind: np.dtype[Any] | None = None

    def add(self, columns: Sequence[tuple[str, Any]], is_list: bool) -> None:
        values = [_numbers(column, f"{self._what}: {name}") for name, column in columns]
        if is_list and any(value.ndim > 1 for value in values):
            made = np.concatenate([value.reshape(len(value), -1) for value in values], axis=1)
        else:
            made = np.stack(values, axis=1) if is_list else values[0]
        kind = self._type_of(made)
        if self._shape is not None and made.shape[1:] != self._shape:
            raise BadData(f"{self._what}: rows have lists of different lengths; give each the same")
        if self._kind is not None and kind != self._kind:
            raise BadData(
                f"{self._what}: it begins with numbers of one type, and then come others; say data.dtypes"
            )
        self._shape, self._kind = made.shape[1:], kind
        self._keep(np.ascontiguousarray(made.astype(kind, copy=False)))

    def _type_of(self, values: Array) -> np.dtype[Any]:
        if self._dtype is not None:
            return np.dtype("float32" if self._dtype in ("bfloat16", "float16") else self._dtype)
        return np.dtype({"f": "float32", "b": "bool"}.get(values.dtype.kind, "int64"))

    def _keep(self, values: Array) -> None:
        self._rows += len(values)
        self._bytes += values.nbytes
        if self._spilled is None and self._bytes > IN_MEMORY_BYTES:
            self._spilled = self._path.open("wb")
            for part in self._parts:
                part.tofile(self._spilled)
            self._parts = []
        if self._spilled is None:
            self._parts.append(values)
        else:
            values.tofile(self._spilled)

    def array(self) -> Array:
        if self._kind is None or self._shape is None:
            return np.zeros(0, dtype=np.float32)
        if self._spilled is None:
            return np.concatenate(self._parts)
        self._spilled.close()
        log.info("a table's column is kept on disk", column=self._what, bytes=self._bytes)
        return np.memmap(self._path, dtype=self._kind, mode="r", shape=(self._rows, *self._shape))


def _numbers(column: Any, what: str) -> Array:
    """(rows,) or (rows, length of its lists) of numbers."""
    import pyarrow as pa

    kind = column.type
    if column.null_count:
        raise BadData(f"{what}: {column.null_count:,} rows have no value; fill them in, or leave them out")
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        rows = len(column)
        flat = _numbers(column.flatten(), what)
        if rows and len(flat) % rows:
            raise BadData(f"{what}: rows have lists of different lengths; give each the same")
        lengths = np.asarray(column.value_lengths()) if hasattr(column, "value_lengths") else np.zeros(0)
        if lengths.size and (lengths != lengths[0]).any():
            raise BadData(f"{what}: rows have lists of different lengths; give each the same")
        return flat.reshape(rows, -1) if rows else flat.reshape(0, 0)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    raise BadData(f"{what} is {kind}, which makes no tensor; give numbers, or turn it into numbers first")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
