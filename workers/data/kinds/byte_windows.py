"""Kind `bytes`: the bytes of a source as tokens, in windows from anywhere."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bus.wire.secret_urls import hidden
from schemas.errors import BadData
from schemas.job_file.data import DataSpec, SourceSpec
from workers.data.batches import Batch, Split
from workers.data.kinds.file_formats import refuse_binary
from workers.data.source_files import SourceFile, files_digest, list_files
from workers.data.windows import TokenArray, draw_windows


@dataclass(frozen=True)
class ByteDataset:
    """Bytes as tokens. The last `validation_fraction` is held out; nothing is shuffled or dropped."""

    source: str
    bytes: Tensor
    train_tokens: int
    digest: str = ""

    def tokens(self, split: Split) -> Tensor:
        """(tokens,) uint8; a view."""
        return self.bytes[: self.train_tokens] if split == "train" else self.bytes[self.train_tokens :]

    @property
    def has_validation(self) -> bool:
        return self.train_tokens < self.bytes.numel()


def open_local_dataset(spec: DataSpec, fetched: Mapping[str, Path] = {}) -> ByteDataset:
    """Reads the whole source into memory, or maps it if it is one local file. Blocks.

    Raises:
        BadData: The source is missing, empty, unreadable, or shorter than one sample and the byte after it.
    """
    files, content = read_bytes(spec, fetched, "data.source")
    rest = rest_of(spec, content.size)
    return ByteDataset(spec.source, torch.from_numpy(content), rest, files_digest(files))


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


def batch(
    dataset: ByteDataset,
    split: Split,
    seed: int,
    step: int,
    microbatch: int,
    samples: int,
    sample_tokens: int,
) -> Batch:
    """One microbatch of windows; see `draw_windows`.

    Raises:
        BadData: The split holds no whole sample.
    """
    tokens = dataset.tokens(split)
    if tokens.numel() <= sample_tokens:
        raise BadData(
            f"data.source {dataset.source}: the {split} part holds no sample of {sample_tokens} tokens"
        )
    return draw_windows(
        tokens.numpy(), split, seed, step, microbatch, samples=samples, sample_tokens=sample_tokens
    )
