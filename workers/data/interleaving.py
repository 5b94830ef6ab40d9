"""How the sources of a mixture take turns: by weight, exactly, in a keyed order, each draw found at once.

Independent draws would need all earlier ones to say which sample of its source a draw is. So draws are
apportioned: a tree of two-way decisions, in each of which a block of `BLOCK` consecutive draws gives
⌊(b+1)·BLOCK·w⌋ − ⌊b·BLOCK·w⌋ of them to the left, in exact rational arithmetic, and a keyed order says which
ones. So the number of earlier draws of a source is a closed form plus a count within one block, whatever the
number of the draw; the share of a source in any prefix differs from its weight by less than a block per
level; and consecutive draws of a mixture are consecutive draws of each of its sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from schemas.data_account import BLOCK
from workers.data.permutation import Indices, keys, mixed


class Interleaving:
    """The turns of sources with these weights.

    Args:
        weights: One for each source, each positive; only their ratios matter.
        key: What the order within a block is drawn from.
    """

    def __init__(self, weights: Sequence[Fraction], *key: object) -> None:
        self._sources = len(weights)
        self._middle = middle = len(weights) // 2
        self._parts: tuple[Interleaving, Interleaving] | None = None
        if middle:
            self._share = sum(weights[:middle], Fraction()) / sum(weights, Fraction())
            self._key = keys(*key, count=1)[0]
            self._parts = (
                Interleaving(weights[:middle], *key, 0),
                Interleaving(weights[middle:], *key, 1),
            )

    def sources(self, start: int, count: int) -> NDArray[np.int64]:
        """The sources of the draws `start` … `start + count - 1`: (count,) int64."""
        if self._parts is None:
            return np.zeros(count, dtype=np.int64)
        left = self._goes_left(start, count)
        found = np.empty(count, dtype=np.int64)
        before, taken = self._left_before(start), int(left.sum())
        found[left] = self._parts[0].sources(before, taken)
        found[~left] = self._middle + self._parts[1].sources(start - before, count - taken)
        return found

    def counts(self, draws: int) -> list[int]:
        """How many of the first `draws` draws each source has."""
        if self._parts is None:
            return [draws]
        left = self._left_before(draws)
        return self._parts[0].counts(left) + self._parts[1].counts(draws - left)

    def _left_before(self, draw: int) -> int:
        block, inside = divmod(draw, BLOCK)
        before = self._left_of_blocks(block)
        return before + int(self._goes_left(block * BLOCK, inside).sum()) if inside else before

    def _left_of_blocks(self, blocks: int) -> int:
        return (blocks * BLOCK * self._share.numerator) // self._share.denominator

    def _goes_left(self, start: int, count: int) -> NDArray[np.bool_]:
        if not count:
            return np.zeros(0, dtype=np.bool_)
        first, last = start // BLOCK, (start + count - 1) // BLOCK
        edges = [self._left_of_blocks(block) for block in range(first, last + 2)]
        ends = np.array(edges, dtype=np.int64)
        quotas: Indices = ends[1:] - ends[:-1]
        draws = np.arange(first * BLOCK, (last + 1) * BLOCK, dtype=np.uint64)
        order = np.argsort(mixed(mixed(draws) + self._key).reshape(-1, BLOCK), axis=1, kind="stable")
        chosen = np.zeros((last - first + 1, BLOCK), dtype=np.bool_)
        np.put_along_axis(chosen, order, np.arange(BLOCK) < quotas[:, None], axis=1)
        skipped = start - first * BLOCK
        flat: NDArray[np.bool_] = chosen.reshape(-1)[skipped : skipped + count]
        return flat
