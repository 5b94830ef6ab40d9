"""Kind `bytes`: the bytes of a source as tokens, and how many of them are trained on."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from bus.wire.secret_urls import hidden
from schemas.errors import BadData
from schemas.job_file.data import DataSpec, SourceSpec
from workers.data.kinds.file_formats import refuse_binary
from workers.data.source_files import SourceFile, copy_file, list_files
from workers.data.windows import JoinedTokens, TokenArray

MOST_IN_MEMORY = 64 << 20
"""Bytes of a source of several files, or remote ones, that are kept in memory: mapping thousands of small
files would take longer than reading them."""
MOST_MAPPED = 256
"""Local files of one source that are mapped at a time. Each takes a descriptor, of which a process has few;
one that is mapped anew costs 20 µs."""


def rest_of(spec: DataSpec, total: int) -> int:
    """How many of `total` tokens are trained on: all but the last `validation_fraction`.

    Raises:
        BadData: They are shorter than one sample and the token after it, or those that are held out are.
    """
    held_out = int(total * spec.held_out)
    unit = "bytes" if spec.kind == "bytes" else "tokens"
    for name, size in (("training", total - held_out), ("validation", held_out)):
        if size <= spec.sample_tokens and (name == "training" or spec.held_out):
            raise BadData(
                f"data.source {spec.source} leaves {size:,} of its {total:,} {unit} for {name}, less than "
                f"one sample of {spec.sample_tokens} tokens and its successor; give more data, lower "
                f"data.sample_tokens, or {'lower' if name == 'training' else 'set to 0'} "
                "data.validation_fraction"
            )
    return total - held_out


def read_bytes(
    spec: SourceSpec, fetched: Mapping[str, Path], key: str, spool: Path
) -> tuple[Sequence[SourceFile], JoinedTokens]:
    """The files of a source, and their bytes one after another: (bytes,) uint8.

    In memory are at most `MOST_IN_MEMORY` of them: files on this machine are mapped, others copied into
    `spool` and mapped there.

    Raises:
        BadData: The source is missing, empty or unreadable, or the copy does not fit on the disk.
    """
    files = list_files(spec.source, fetched, key=key)
    try:
        refuse_binary(files, spec.source, spec.kind, key)
        content = JoinedTokens(_mapped(files) or [_gathered(files, spool)])
    except OSError as error:
        raise BadData(f"{key} {spec.source} can't be read: {hidden(str(error.strerror or error))}") from None
    if not content.size:
        raise BadData(f"{key} {spec.source} is empty")
    return files, content


@dataclass(frozen=True, slots=True)
class MappedFile:
    """The bytes of a local file, (size,) uint8, mapped when some are asked for.

    Attributes:
        path: The file.
        size: Its bytes when it was found.
        mapped: Maps a file, or has done so.
    """

    path: Path
    size: int
    mapped: Callable[[Path], TokenArray]

    def __getitem__(self, part: slice, /) -> TokenArray:
        content = self.mapped(self.path)
        if content.size != self.size:
            raise BadData(
                f"{self.path} has changed since it was opened (now {content.size:,} bytes, not "
                f"{self.size:,}); data must stay as it is while a job reads it: give new data a new name"
            )
        return content[part]


def _mapped(files: Sequence[SourceFile]) -> Sequence[MappedFile]:
    """Files on this machine; none if there are others, or several small ones, which memory holds."""
    paths = [(file.local, file.size) for file in files if file.local is not None and file.size]
    if any(file.local is None for file in files):
        return ()
    if len(files) > 1 and sum(size for _, size in paths) <= MOST_IN_MEMORY:
        return ()
    mapped = lru_cache(MOST_MAPPED)(_map)
    return [MappedFile(path, size, mapped) for path, size in paths]


def _map(path: Path) -> TokenArray:
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return np.zeros(0, dtype=np.uint8)  # which can't be mapped
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def _gathered(files: Sequence[SourceFile], spool: Path) -> TokenArray:
    """The bytes of all files, copied into memory; where they are too many, into one file that is mapped.

    The file has no name: it is gone with its mapping, however the process ends.
    """
    with tempfile.SpooledTemporaryFile(MOST_IN_MEMORY, dir=str(spool)) as copy:
        if sum(file.size for file in files) > MOST_IN_MEMORY:
            copy.rollover()
        for file in files:
            copy_file(file, copy)
        size = copy.tell()
        if size > MOST_IN_MEMORY:
            copy.flush()
            return np.frombuffer(mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        copy.seek(0)
        return np.frombuffer(copy.read(), dtype=np.uint8)
