"""Windows of bytes by plain torch, as loops that a mesh is compared with want them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from schemas.errors import BadData
from schemas.job_file.data import DataSpec
from workers.data.batches import Batch, Split
from workers.data.kinds.byte_windows import read_bytes, rest_of
from workers.data.source_files import files_digest
from workers.data.windows import draw_windows


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
    """Reads the whole source into memory. Blocks.

    Raises:
        BadData: The source is missing, empty, unreadable, or shorter than one sample and the byte after it.
    """
    files, content = read_bytes(spec, fetched, "data.source", Path(tempfile.gettempdir()))
    rest = rest_of(spec, content.size)
    return ByteDataset(spec.source, torch.from_numpy(content[:].copy()), rest, files_digest(files))


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
