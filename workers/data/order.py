"""Which sample is where in a job: a pure function of (seed, split, position), with nothing stored (ADR-0046).

The position of a sample is (step · microbatches + microbatch) · samples + sample. So whoever makes a batch,
again or elsewhere, takes the same samples, and each sample of a source is taken exactly once in each of that
source's epochs, whoever died and in whatever shape a job was resumed.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from workers.data.interleaving import Interleaving
from workers.data.permutation import Indices, Permutation

BLOCKS_TOGETHER = 8
"""Blocks (shards) whose samples are shuffled together: neighbours in a file do not stay neighbours."""


@dataclass(frozen=True)
class OrderedSource:
    """What the order knows of a source.

    Attributes:
        size: Samples of an epoch, at least 1.
        blocks: Sizes of the runs of samples that are read together, in order; empty: any access is as cheap.
        shuffled: Else the samples come as they lie.
        weight: Its share among the sources.
    """

    size: int
    blocks: tuple[int, ...] = ()
    shuffled: bool = True
    weight: Fraction = field(default=Fraction(1))

    def __post_init__(self) -> None:
        if self.size < 1 or self.weight <= 0 or (self.blocks and sum(self.blocks) != self.size):
            raise ValueError(f"no order has {self}")


@dataclass(frozen=True)
class Draws:
    """Consecutive samples: (count,) int64 each. `indices` are within the source, `epochs` the source's."""

    sources: Indices
    epochs: Indices
    indices: Indices


class SampleOrder:
    """The order of one split.

    Args:
        seed: The job's `training.seed`.
        split: Its name; each split has an order of its own.
        sources: What is drawn from.
        whole_steps: Samples of a step, if each epoch leaves out the samples that fill no whole step
            (`data.last: drop`; for one source). 0: the next epoch fills the step.

    Raises:
        ValueError: There are no sources, or an epoch holds no whole step.
    """

    def __init__(
        self, seed: int, split: str, sources: Sequence[OrderedSource], *, whole_steps: int = 0
    ) -> None:
        if whole_steps and (len(sources) != 1 or sources[0].size < whole_steps):
            raise ValueError(f"steps of {whole_steps} samples from {sources}")
        weights = [source.weight for source in sources]
        self._turns = Interleaving(weights, seed, split, "turns")
        self._sources = [
            _SourceOrder(source, (seed, split, number), whole_steps) for number, source in enumerate(sources)
        ]

    def draws(self, start: int, count: int) -> Draws:
        """The samples at the positions `start` … `start + count - 1`."""
        sources = self._turns.sources(start, count)
        epochs, indices = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        for number, (before, order) in enumerate(zip(self._turns.counts(start), self._sources, strict=True)):
            here = np.flatnonzero(sources == number)
            epochs[here], indices[here] = order.draws(before, here.size)
        return Draws(sources, epochs, indices)

    def sample_at(self, position: int) -> tuple[int, int, int]:
        """(source, its epoch, index within it) of the sample at one position."""
        found = self.draws(position, 1)
        return int(found.sources[0]), int(found.epochs[0]), int(found.indices[0])

    def counts(self, position: int) -> list[int]:
        """How many of the first `position` samples each source gives."""
        return self._turns.counts(position)

    def epoch_sizes(self) -> list[int]:
        """Samples of an epoch of each source, without what it leaves out."""
        return [order.size for order in self._sources]


class _SourceOrder:
    """The order of one source: draw d is number d mod size of epoch d ÷ size."""

    def __init__(self, source: OrderedSource, key: tuple[object, ...], whole_steps: int) -> None:
        self.size = source.size - source.size % whole_steps if whole_steps else source.size
        self._source = source
        self._key = key
        self._epoch = functools.lru_cache(maxsize=4)(self._epoch_order)

    def draws(self, start: int, count: int) -> tuple[Indices, Indices]:
        epochs, indices = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            epoch, inside = divmod(start + done, self.size)
            now = min(count - done, self.size - inside)
            places = np.arange(inside, inside + now, dtype=np.int64)
            order = self._epoch(epoch)
            epochs[done : done + now] = epoch
            indices[done : done + now] = places if order is None else order(places)
            done += now
        return epochs, indices

    def _epoch_order(self, epoch: int) -> Permutation | _BlockOrder | None:
        if not self._source.shuffled or self._source.size == 1:
            return None
        if len(self._source.blocks) > 1:
            return _BlockOrder(self._source.blocks, (*self._key, epoch))
        return Permutation(self._source.size, *self._key, epoch)


class _BlockOrder:
    """One epoch of a source in blocks: these are permuted, and the samples of `BLOCKS_TOGETHER` of them."""

    def __init__(self, blocks: Sequence[int], key: tuple[object, ...]) -> None:
        sizes = np.array(blocks, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        order = Permutation(len(blocks), *key, "blocks")(np.arange(len(blocks), dtype=np.int64))
        self._sizes, self._starts = sizes[order], starts[order]
        self._ends = np.cumsum(self._sizes)
        self._group_ends = [0, *self._ends[BLOCKS_TOGETHER - 1 :: BLOCKS_TOGETHER].tolist()]
        if self._group_ends[-1] != self._ends[-1]:
            self._group_ends.append(int(self._ends[-1]))
        self._key = key

    def __call__(self, places: Indices) -> Indices:
        """`places` are consecutive."""
        found = np.empty_like(places)
        done = 0
        while done < places.size:
            group = bisect.bisect_right(self._group_ends, int(places[done])) - 1
            first, end = self._group_ends[group], self._group_ends[group + 1]
            now = min(places.size - done, end - int(places[done]))
            inside = places[done : done + now] - first
            mixed = first + Permutation(end - first, *self._key, "group", group)(inside)
            block = np.searchsorted(self._ends, mixed, side="right")
            found[done : done + now] = self._starts[block] + mixed - (self._ends - self._sizes)[block]
            done += now
        return found
