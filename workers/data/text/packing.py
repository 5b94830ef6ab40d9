"""Which tokens make which sample: a pure function of the documents' borders.

Positions are those of a file of tokens. With `ahead` 1 a sample of n tokens also needs the token behind its
last one, which is its last target; with 0 it does not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


class DocumentSlice(NamedTuple):
    """Tokens [start, stop) of one document. `crosses`: their last target would be another document's."""

    document: int
    start: int
    stop: int
    crosses: bool


class SamplePacking(ABC):
    """Samples as segments of documents.

    Args:
        sample_tokens: Most tokens of a sample.
    """

    padded: bool
    """Whether a sample may have fewer than `sample_tokens` tokens."""

    def __init__(self, sample_tokens: int) -> None:
        self.sample_tokens = sample_tokens
        self.truncated = 0
        self.left_out = 0
        """Documents that were cut short; and those too short to teach anything."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def segments(self, index: int) -> list[DocumentSlice]:
        """The segments of a sample, in order."""


class ConcatenatedPacking(SamplePacking):
    """Windows over all tokens, without overlap: each target once. What is left at the end is dropped."""

    padded = False

    def __init__(self, offsets: npt.NDArray[np.uint64], sample_tokens: int, ahead: int) -> None:
        super().__init__(sample_tokens)
        self._offsets = offsets
        self._samples = max(0, int(offsets[-1]) - ahead) // sample_tokens
        self._ahead = ahead

    def __len__(self) -> int:
        return self._samples

    def segments(self, index: int) -> list[DocumentSlice]:
        start = index * self.sample_tokens
        end = start + self.sample_tokens
        found = []
        document = int(np.searchsorted(self._offsets, np.uint64(start), side="right")) - 1
        while start < end:
            border = int(self._offsets[document + 1])
            stop = min(border, end)
            if stop > start:  # a bad document has no tokens
                found.append(DocumentSlice(document, start, stop, stop == border))
            start, document = stop, document + 1
        return found


class WholePacking(SamplePacking):
    """One document a sample; a longer one is split into several samples, or truncated.

    Args:
        offsets: The documents' borders.
        sample_tokens: Most tokens of a sample.
        ahead: Whether the token behind a sample is needed.
        split: Whether a longer document is split.
        least: Documents with fewer tokens are left out.
        bad: Documents without tokens that are samples all the same, so that each is accounted for.
    """

    padded = True

    def __init__(
        self,
        offsets: npt.NDArray[np.uint64],
        sample_tokens: int,
        ahead: int,
        *,
        split: bool,
        least: int = 1,
        bad: Sequence[int] = (),
    ) -> None:
        super().__init__(sample_tokens)
        borders = offsets.astype(np.int64)
        lengths = np.maximum(np.diff(borders) - ahead, 0)
        lengths[np.diff(borders) < least] = 0
        counts = -(-lengths // sample_tokens)
        if not split:
            self.truncated = int((counts > 1).sum())
            counts = np.minimum(counts, 1)
        self.left_out = int((np.diff(borders) > 0).sum() - (counts > 0).sum())
        counts[list(bad)] = 1
        self._documents = np.repeat(np.arange(len(lengths)), counts)
        ordinal = np.arange(len(self._documents)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._starts: Positions = borders[:-1][self._documents] + ordinal * sample_tokens
        self.lengths: Positions = np.minimum(
            lengths[self._documents] - ordinal * sample_tokens, sample_tokens
        )

    def __len__(self) -> int:
        return len(self._starts)

    def segments(self, index: int) -> list[DocumentSlice]:
        return [self.segment(index)]

    def segment(self, chunk: int) -> DocumentSlice:
        """A document, or a part of one."""
        start = int(self._starts[chunk])
        return DocumentSlice(int(self._documents[chunk]), start, start + int(self.lengths[chunk]), False)


class BestFitPacking(SamplePacking):
    """Documents whole, several a sample: best-fit decreasing (Ding et al. 2024, "Fewer Truncations").

    The longest first, each into the sample with the least room that suffices; of equal ones into that which
    was filled last. Samples are in the order of their first documents.
    """

    padded = True

    def __init__(self, documents: WholePacking) -> None:
        super().__init__(documents.sample_tokens)
        self.truncated, self.left_out = documents.truncated, documents.left_out
        self._documents = documents
        sample_of = np.array(list(_best_fit(documents.lengths, documents.sample_tokens)), np.int64)
        self._chunks = np.argsort(sample_of, kind="stable")
        firsts = np.flatnonzero(np.diff(sample_of[self._chunks], prepend=-1))
        by_first = np.argsort(self._chunks[firsts], kind="stable")
        self._firsts: Positions = firsts[by_first]
        self._counts: Positions = np.diff(firsts, append=len(self._chunks))[by_first]

    def __len__(self) -> int:
        return len(self._firsts)

    def segments(self, index: int) -> list[DocumentSlice]:
        first = int(self._firsts[index])
        chunks = self._chunks[first : first + int(self._counts[index])]
        return [self._documents.segment(int(chunk)) for chunk in chunks]


def _best_fit(lengths: Positions, capacity: int) -> Iterator[int]:
    """The sample of each chunk, in the chunks' order."""
    sample_of = [0] * len(lengths)
    rooms: dict[int, list[int]] = {}  # room → samples that have it
    free = 0  # bit r: a sample has room r
    samples = 0
    for chunk in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[chunk])
        fitting = free >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sample = rooms[room].pop()
            if not rooms[room]:
                free &= ~(1 << room)
        else:
            room, sample = capacity, samples
            samples += 1
        sample_of[chunk] = sample
        if left := room - length:
            rooms.setdefault(left, []).append(sample)
            free |= 1 << left
    yield from sample_of
