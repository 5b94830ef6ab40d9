"""From when each block is needed next, against looking through the order."""

from __future__ import annotations

import numpy as np

from workers.data.storage.cache_plan import UNKNOWN
from workers.data.storage.foresight import BlockUses, Foresight, Indices

SAMPLES, PER_BLOCK = 60, 5
ORDER = np.concatenate([np.random.default_rng(seed).permutation(SAMPLES) for seed in range(5)])
ORDER[::7] = -1  # samples of another source


def upcoming(start: int, count: int) -> Indices:
    return ORDER[start : start + count]


def made(horizon: int) -> Foresight:
    return Foresight(upcoming, np.arange(SAMPLES) // PER_BLOCK, SAMPLES // PER_BLOCK, horizon)


def seen(foresight: Foresight, position: int) -> BlockUses:
    """The uses from a position, looked up anew where too little is seen."""
    if foresight.is_short(position):
        foresight.renew(position)
    uses = foresight.at(position)
    assert uses is not None
    return uses


def test_next_uses_are_those_of_the_order() -> None:
    foresight = made(2 * SAMPLES)
    for position in range(0, 2 * SAMPLES, 11):
        uses = seen(foresight, position)
        assert uses.next_uses().tolist() == [uses.next_use(block) for block in range(SAMPLES // PER_BLOCK)]
        for block in range(SAMPLES // PER_BLOCK):
            ahead = np.flatnonzero((ORDER[position:] >= 0) & (ORDER[position:] // PER_BLOCK == block))
            assert uses.next_use(block) == ahead[0]
            assert uses.next_use(block, after=position + int(ahead[0])) == ahead[1]
            assert uses.count_before(block, 20.0) == (ahead < 20).sum()


def test_what_lies_beyond_the_horizon_is_needed_by_nobody() -> None:
    uses = seen(made(4), 0)
    soon = {int(sample) // PER_BLOCK for sample in ORDER[:4] if sample >= 0}
    for block in range(SAMPLES // PER_BLOCK):
        assert (uses.next_use(block) == UNKNOWN) == (block not in soon)
        assert uses.next_uses()[block] == uses.next_use(block)


def test_it_goes_back_after_a_roll_back() -> None:
    foresight = made(30)
    first = [seen(foresight, 3).next_use(block) for block in range(12)]
    seen(foresight, 100)
    assert foresight.at(3) is None
    assert [seen(foresight, 3).next_use(block) for block in range(12)] == first
