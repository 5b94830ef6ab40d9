"""From when each block of a source is needed next, by the order of the samples. Pure, but for its tables.

The order is asked for `horizon` positions at a time. What is not needed within them, nobody needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from workers.data.storage.cache_plan import UNKNOWN

Indices: TypeAlias = NDArray[np.int64]
Upcoming: TypeAlias = Callable[[int, int], Indices]
"""(first position, count) → the samples at these positions, (count,) int64; -1: another source's."""

HORIZON = 1 << 21
"""Most positions that are looked ahead: 24 bytes each."""
PIECE = 1 << 16


@dataclass(frozen=True)
class _Table:
    """The uses of each block from position `first` on, ascending: of block b from `starts[b]` on."""

    first: int
    end: int
    starts: Indices
    uses: NDArray[np.int64]


class Foresight:
    """What is needed when, of a source of which each sample begins in one block.

    Args:
        upcoming: The order.
        block_of: (samples,) int64: the block in which each sample begins.
        blocks: Number of blocks.
        horizon: Positions that are looked ahead; by default two epochs, at most `HORIZON`.
    """

    def __init__(
        self, upcoming: Upcoming, block_of: Indices, blocks: int, horizon: int | None = None
    ) -> None:
        self._upcoming = upcoming
        self._block_of = block_of
        self._blocks = blocks
        self._horizon = horizon or max(1, min(HORIZON, 2 * len(block_of)))
        self._table = _Table(0, 0, np.zeros(blocks + 1, dtype=np.int64), np.zeros(0, dtype=np.int64))

    @property
    def horizon(self) -> int:
        """Positions that are looked ahead."""
        return self._horizon

    def at(self, position: int) -> BlockUses | None:
        """The uses from this position on; None: `renew` has not looked there yet."""
        table = self._table
        if not table.first <= position < table.end:
            return None
        return BlockUses(position, table.starts, table.uses)

    def is_short(self, position: int) -> bool:
        """Whether less than half of the horizon is seen from this position."""
        return position < self._table.first or self._table.end - position < self._horizon // 2

    def renew(self, position: int) -> None:
        """Looks ahead from this position: some microseconds for each one of the horizon."""
        self._table = self._build(position)

    def _build(self, first: int) -> _Table:
        samples = np.concatenate(
            [
                self._upcoming(start, min(PIECE, first + self._horizon - start))
                for start in range(first, first + self._horizon, PIECE)
            ]
        )
        mine = np.flatnonzero(samples >= 0)
        blocks = self._block_of[samples[mine]]
        order = np.argsort(blocks, kind="stable")
        starts = np.searchsorted(blocks[order], np.arange(self._blocks + 1))
        return _Table(first, first + self._horizon, starts, first + mine[order])


@dataclass(frozen=True)
class BlockUses:
    """The uses of blocks as seen from one position."""

    position: int
    starts: Indices
    uses: Indices

    def next_use(self, block: int, *, after: int | None = None) -> float:
        """Positions until a block's first use, beyond `after` if given; `UNKNOWN`: none in sight."""
        uses = self._of(block)
        place = np.searchsorted(uses, self.position if after is None else after + 1)
        return float(uses[place] - self.position) if place < len(uses) else UNKNOWN

    def next_uses(self) -> NDArray[np.float64]:
        """`next_use` of all blocks at once: (blocks,) float64. A call for each block takes seconds of 10⁶."""
        begins, ends = self.starts[:-1], self.starts[1:]
        past = np.concatenate([[0], np.cumsum(self.uses < self.position)])
        firsts = begins + past[ends] - past[begins]
        known = np.flatnonzero(firsts < ends)
        found = np.full(len(begins), UNKNOWN)
        found[known] = self.uses[firsts[known]] - self.position
        return found

    def count_before(self, block: int, distance: float) -> int:
        """How often a block is needed in the next `distance` positions, that of now included."""
        uses = self._of(block)
        first = np.searchsorted(uses, self.position)
        if distance == UNKNOWN:
            return len(uses) - int(first)
        return int(np.searchsorted(uses, self.position + distance) - first)

    def _of(self, block: int) -> Indices:
        return self.uses[self.starts[block] : self.starts[block + 1]]
