"""Windows of tokens from anywhere in the data: drawn anew for each sample, so that there are no epochs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.errors import BadData
from workers.data.batches import Batch, SourceAccount, Split

TokenArray = NDArray[Any]
"""(tokens,) of an unsigned or signed integer type; it may be mapped from a file."""


class Tokens(Protocol):
    """What gives parts of itself as arrays: an array, or what reads its tokens when they are asked for."""

    @property
    def size(self) -> int: ...

    def __getitem__(self, part: slice, /) -> TokenArray: ...


class JoinedTokens:
    """Several arrays of tokens as if they were one.

    Args:
        arrays: (tokens,) each, of one dtype.
    """

    def __init__(self, arrays: Sequence[Tokens]) -> None:
        self._arrays = tuple(arrays)
        sizes = np.array([array.size for array in arrays], dtype=np.int64)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        self._first = 0
        self.size = int(sizes.sum())

    def part(self, first: int, last: int) -> JoinedTokens:
        """The tokens `first` … `last` - 1, of which none is read."""
        part = copy(self)
        part._first = self._first + first
        part.size = last - first
        return part

    def __getitem__(self, part: slice) -> TokenArray:
        first, last = part.start or 0, self.size if part.stop is None else min(part.stop, self.size)
        first, last = self._first + first, self._first + last
        number = int(np.searchsorted(self._ends, first, side="right"))
        found = []
        while first < last:
            start, end = int(self._starts[number]), int(self._ends[number])
            found.append(self._arrays[number][first - start : last - start])
            first, number = end, number + 1
        return found[0] if len(found) == 1 else np.concatenate(found or [np.zeros(0, dtype=np.int64)])


def draw_windows(
    tokens: TokenArray | JoinedTokens,
    split: Split,
    seed: int,
    step: int,
    microbatch: int,
    *,
    samples: int,
    sample_tokens: int,
) -> Batch:
    """Samples at offsets drawn by BLAKE2b from (seed, split, step, microbatch, sample) only.

    So any data instance can make any batch, repeatedly, on any version of torch.

    Args:
        tokens: At least `sample_tokens` + 1.

    Returns:
        `inputs` and `targets`, each (samples, sample_tokens) int64; targets are the inputs one token later.
    """
    choices = tokens.size - sample_tokens
    window = np.empty((samples, sample_tokens + 1), dtype=np.int64)
    for sample in range(samples):
        text = f"{seed}/{split}/{step}/{microbatch}/{sample}".encode()
        offset = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") % choices
        window[sample] = tokens[offset : offset + sample_tokens + 1]
    drawn = torch.from_numpy(window)
    return {"inputs": drawn[:, :-1].contiguous(), "targets": drawn[:, 1:].contiguous()}


class WindowBatches:
    """A `BatchSource` of windows.

    Args:
        splits: Its tokens by split, `train` among them, each more than `sample_tokens`.
        seed: The job's `training.seed`.
        samples: Samples of a microbatch.
        step_samples: Samples of a step.
        sample_tokens: Tokens of a sample.
        digest: Of the data.
    """

    names = ("inputs", "targets")
    replaced = 0

    def __init__(
        self,
        splits: Mapping[Split, JoinedTokens],
        *,
        seed: int,
        samples: int,
        step_samples: int,
        sample_tokens: int,
        digest: str,
    ) -> None:
        self.splits = dict(splits)
        self._seed = seed
        self._sizes = {"samples": samples, "sample_tokens": sample_tokens}
        self._step_samples = step_samples
        self.digest = digest
        self.tokens = sum(tokens.size for tokens in splits.values())
        self.vocabulary: int | None = None

    def batch(self, split: Split, step: int, microbatch: int) -> Batch:
        tokens = self.splits.get(split)
        if tokens is None:
            raise BadData(f"data: there is no {split} part; there are {', '.join(self.splits)}")
        return draw_windows(tokens, split, self._seed, step, microbatch, **self._sizes)

    def samples(self, split: Split, step: int, microbatch: int) -> list[Batch]:
        batch = self.batch(split, step, microbatch)
        count = self._sizes["samples"]
        return [{name: tensor[number] for name, tensor in batch.items()} for number in range(count)]

    def expect(self, split: Split, step: int, microbatch: int) -> None:
        """Nothing: the tokens are in memory, or mapped."""

    def size(self, split: Split) -> int | None:
        return None

    def account(self, step: int) -> tuple[SourceAccount, ...]:
        return (SourceAccount("data", step * self._step_samples, None),)

    def close(self) -> None:
        self.splits.clear()
