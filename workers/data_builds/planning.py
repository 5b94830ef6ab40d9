"""The plan of a build: which files there are, and how they are cut into units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import MOST_ROW_BYTES, MOST_UNITS, SourceUnit
from schemas.errors import BadData
from schemas.job_file.data_set_use import SCHEME
from schemas.urls import STDLIB
from workers.data.source_files import SourceFile, list_files
from workers.data.text.documents import PACKED
from workers.data.text.tokenizer_files import library
from workers.data_builds.reading import is_packed, plain_name, row_format, too_long, version_of


def planned(spec: DataBuildSpec, fetched: Mapping[str, Path] = {}) -> tuple[SourceUnit, ...]:
    """The units of a build: files in order of the sources and of their paths, rows in order of the file.

    Args:
        spec: The build.
        fetched: `bus://` URL → file.

    Raises:
        BadData: A source is missing, can't be read, or holds files of several kinds; or there would be too
            many units.
    """
    units: list[SourceUnit] = []
    for number, source in enumerate(spec.sources):
        key = f"source[{number}]"
        if source.startswith(SCHEME):
            raise BadData(
                f"{key} {source}: a build reads files, no data sets; name what that one was built from"
            )
        files = list_files(source, fetched, key=key)
        if not files:
            raise BadData(f"{key} {source} is a folder without files")
        _refuse_mixture(files, spec, key, source)
        least = sum(file.size for file in files) // MOST_UNITS
        if least > spec.unit_bytes:
            raise BadData(_too_many(spec, least))
        units += _Cutter(spec, number, source).units(files)
        if len(units) > MOST_UNITS:
            raise BadData(_too_many(spec, sum(unit.bytes for unit in units) // MOST_UNITS))
    return tuple(units)


def _too_many(spec: DataBuildSpec, least: int) -> str:
    return (
        f"data set {spec.name} would have more than {MOST_UNITS:,} units; say unit_bytes: "
        f"{max(least, spec.unit_bytes) * 2} or more"
    )


def _refuse_mixture(files: Sequence[SourceFile], spec: DataBuildSpec, key: str, source: str) -> None:
    found: dict[str, str] = {}
    for file in files:
        found.setdefault(row_format(file.name, spec), file.name)
    if len(found) > 1:
        kinds = ", ".join(f"{name} ({kind})" for kind, name in found.items())
        raise BadData(
            f"{key} {source} holds files of several kinds, as {kinds}; name those that are meant by a "
            "pattern such as data/*.parquet, or say format"
        )


class _Cutter:
    """Cuts the files of one source: small ones are put together, large ones cut where that is possible."""

    def __init__(self, spec: DataBuildSpec, number: int, source: str) -> None:
        self._spec = spec
        self._number = number
        self._source = source

    def units(self, files: Sequence[SourceFile]) -> Iterator[SourceUnit]:
        together: list[SourceFile] = []
        size = 0
        for file in files:
            cuts = self._cuts(file) if file.size > self._spec.unit_bytes else []
            if together and (cuts or size + file.size > self._spec.unit_bytes):
                yield self._unit(together, size)
                together, size = [], 0
            if cuts:
                for start, stop, content in cuts:
                    yield self._unit([file], content, start, stop)
            else:
                together.append(file)
                size += file.size
        if together:
            yield self._unit(together, size)

    def _unit(self, files: Sequence[SourceFile], size: int, start: int = 0, stop: int = 0) -> SourceUnit:
        is_library = self._source.startswith(STDLIB)
        return SourceUnit(
            source=self._number,
            files=tuple(file.name if is_library else file.path for file in files),
            start=start,
            stop=stop,
            bytes=size,
            versions=tuple(map(version_of, files)),
        )

    def _cuts(self, file: SourceFile) -> list[tuple[int, int, int]]:
        """(start, stop, bytes) of each part of a large file; none if it is read as a whole."""
        kind = row_format(file.name, self._spec)
        if kind == "text":
            if file.size > MOST_ROW_BYTES and not _is_named_packed(file):
                raise BadData(f"source[{self._number}] {too_long(file)}")
            return []
        if kind == "parquet":
            return self._groups(file)
        if _is_named_packed(file) or is_packed(file.head()):
            return []
        step = self._spec.unit_bytes
        ends = [*range(step, file.size - step // 2, step), file.size]
        return [(end - size, end, size) for end, size in _sized(ends)]

    def _groups(self, file: SourceFile) -> list[tuple[int, int, int]]:
        key = f"source[{self._number}]"
        parquet = library("pyarrow.parquet", file.name, key=key)
        arrow = library("pyarrow", file.name, key=key)
        try:
            with file.open() as stream:
                metadata = parquet.ParquetFile(stream).metadata
                sizes = [_group_bytes(metadata.row_group(group)) for group in range(metadata.num_row_groups)]
        except arrow.ArrowException as error:
            raise BadData(
                f"{key} {file.name} can't be read as Parquet: {str(error).splitlines()[0]}"
            ) from None
        cuts: list[tuple[int, int, int]] = []
        for group, size in enumerate(sizes):
            if cuts and cuts[-1][2] + size <= self._spec.unit_bytes:
                cuts[-1] = (cuts[-1][0], group + 1, cuts[-1][2] + size)
            else:
                cuts.append((group, group + 1, size))
        return cuts


def _sized(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    before = 0
    for end in ends:
        yield end, end - before
        before = end


def _group_bytes(group: object) -> int:
    columns = [group.column(number) for number in range(group.num_columns)]  # type: ignore[attr-defined]
    return sum(column.total_compressed_size for column in columns)


def _is_named_packed(file: SourceFile) -> bool:
    return plain_name(file.name) != file.name.casefold() and file.name.casefold().endswith(PACKED)
