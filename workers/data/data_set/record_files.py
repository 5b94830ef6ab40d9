"""The records of a built data set, as files for the kinds that read files of JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from schemas.errors import BadData
from schemas.job_file.data import SourceSpec
from workers.data.data_set.fetching import key_of
from workers.data.data_set.split_files import SplitFiles
from workers.data.samples import Opening
from workers.data.source_files import SourceFile, list_files


def files_of(spec: SourceSpec, opening: Opening, endings: tuple[str, ...] = ()) -> list[SourceFile]:
    """The files of a source: those of a data set's records, or those at a path or URL.

    Raises:
        BadData: See `list_files` and `record_files`.
    """
    if spec.data_set is not None:
        return record_files(spec, opening.fetched, opening.at)
    return list_files(spec.source, opening.fetched, key=f"{opening.at}.source", endings=endings)


@dataclass(frozen=True)
class ShardSourceFile(SourceFile):
    """A shard of records as a file of JSON lines; what is read of it was compared with its digest."""

    _files: Any = field(default=None, repr=False, compare=False)
    _shard: int = 0

    def open(self) -> BinaryIO:
        files: SplitFiles = self._files
        return files.file(self._shard)


def record_files(spec: SourceSpec, fetched: Mapping[str, Path], at: str) -> list[SourceFile]:
    """The records of a split, as files of JSON lines.

    Raises:
        BadData: It holds tokens, or its files are not there.
    """
    assert spec.data_set is not None
    files = SplitFiles(spec.data_set, fetched, at)
    if files.manifest.content != "records":
        files.close()
        raise BadData(
            f"{at}.source {key_of(spec.data_set)} holds {files.manifest.content} of tokens, not records; say "
            f"{at}.kind: dataset"
        )
    return [
        ShardSourceFile(
            f"{files.split}-{number:05}.jsonl", shard.bytes, shard.sha256, _files=files, _shard=number
        )
        for number, shard in enumerate(files.shards)
    ]
