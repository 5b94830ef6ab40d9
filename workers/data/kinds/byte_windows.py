"""Kind `bytes`: the bytes of a source as tokens, and how many of them are trained on."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bus.wire.secret_urls import hidden
from schemas.errors import BadData
from schemas.job_file.data import DataSpec, SourceSpec
from workers.data.kinds.file_formats import refuse_binary
from workers.data.source_files import SourceFile, list_files
from workers.data.windows import TokenArray


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
    spec: SourceSpec, fetched: Mapping[str, Path], key: str
) -> tuple[Sequence[SourceFile], TokenArray]:
    """The files of a source, and their bytes one after another: (bytes,) uint8.

    Raises:
        BadData: The source is missing, empty or unreadable.
    """
    files = list_files(spec.source, fetched, key=key)
    try:
        refuse_binary(files, spec.source, spec.kind, key)
        content = _content(files)
    except OSError as error:
        raise BadData(f"{key} {spec.source} can't be read: {hidden(str(error.strerror or error))}") from None
    if not content.size:
        raise BadData(f"{key} {spec.source} is empty")
    return files, content


def _content(files: Sequence[SourceFile]) -> TokenArray:
    if len(files) == 1 and files[0].local is not None and files[0].size:
        with files[0].open() as file:  # a private mapping: writable, as torch wants it, and never written
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=np.uint8)
    content = bytearray()
    for each in files:
        with each.open() as file:
            content += file.read()
    return np.frombuffer(content, dtype=np.uint8)
