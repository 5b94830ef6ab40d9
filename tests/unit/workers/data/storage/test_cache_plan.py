"""What a cache keeps when it knows the future, beside what LRU would keep."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from workers.data.storage.cache_plan import UNKNOWN, EvictionQueue, KeptBlock, worth_whole

BLOCKS, EPOCHS, SEED = 400, 4, 7


def queue(**uses: float) -> EvictionQueue:
    return EvictionQueue.of({key: KeptBlock(10, use) for key, use in uses.items()})


def test_what_is_needed_last_goes_first_and_no_more_goes_than_must() -> None:
    found = queue(soon=1, later=5, last=9).place(10, 3, room=0)
    assert (found.keep, found.evict) == (True, ("last",))


def test_a_block_that_is_needed_later_than_all_that_is_kept_is_not_kept() -> None:
    kept = queue(soon=1, later=5)
    found = kept.place(10, 7, room=0)
    assert not found.keep
    assert "earlier" in found.reason
    assert kept.shrink(1) == ("later",), "and nothing has gone for it"


def test_what_nobody_is_known_to_need_goes_before_all_others_the_oldest_first() -> None:
    kept = EvictionQueue.of(
        {
            "needed": KeptBlock(10, 1e9, age=99),
            "old": KeptBlock(10, UNKNOWN, age=5),
            "new": KeptBlock(10, UNKNOWN, age=1),
        }
    )
    assert kept.place(10, UNKNOWN, room=0).evict == ("old",)
    assert kept.place(10, 3, room=0).evict == ("new",)
    assert not kept.place(10, UNKNOWN, room=0).keep


def test_a_larger_block_displaces_several_or_none() -> None:
    assert queue(a=4, b=5).place(20, 3, room=0).evict == ("b", "a")
    kept = queue(a=2, b=5)
    assert not kept.place(20, 3, room=0).keep
    assert kept.furthest == 5


def fetches_after_the_first_epoch(part: float, orders: list[list[int]]) -> float:
    """Fetched blocks per epoch, as a part of all; the queue is made anew for 1 % of the blocks."""
    sequence = [block for order in orders for block in order]
    following = [UNKNOWN] * len(sequence)
    last: dict[int, int] = {}
    for place in range(len(sequence) - 1, -1, -1):
        following[place] = last.get(sequence[place], UNKNOWN)
        last[sequence[place]] = place
    kept: dict[str, KeptBlock] = {}
    plan, left, fetched = EvictionQueue(), 0, 0
    room = int(part * BLOCKS)
    for place, block in enumerate(sequence):
        key = str(block)
        if key not in kept:
            fetched += place >= BLOCKS
            if left <= 0:
                plan, left = EvictionQueue.of(kept), len(kept) // 100
            left -= 1
            found = plan.place(1, following[place], room - len(kept))
            for gone in found.evict:
                kept.pop(gone, None)
            if found.keep:
                kept[key] = KeptBlock(1, following[place])
        else:
            kept[key] = KeptBlock(1, following[place])
    return fetched / BLOCKS / (len(orders) - 1)


def lru_fetches_after_the_first_epoch(part: float, orders: list[list[int]]) -> float:
    kept: OrderedDict[int, None] = OrderedDict()
    fetched = 0
    for place, block in enumerate(block for order in orders for block in order):
        if block not in kept:
            fetched += place >= BLOCKS
        kept[block] = None
        kept.move_to_end(block)
        if len(kept) > part * BLOCKS:
            kept.popitem(last=False)
    return fetched / BLOCKS / (len(orders) - 1)


@pytest.mark.parametrize(("part", "bar"), [(0.25, 0.79), (0.5, 0.53), (0.75, 0.27)])
def test_random_epochs_fetch_what_does_not_fit_and_hardly_more(part: float, bar: float) -> None:
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    orders = [draw.sample(range(BLOCKS), BLOCKS) for _ in range(EPOCHS)]
    fetched, lru = (
        fetches_after_the_first_epoch(part, orders),
        lru_fetches_after_the_first_epoch(part, orders),
    )
    print(f"cache {part:.0%}: {fetched:.3f} of the data per epoch, LRU {lru:.3f}")
    assert fetched <= bar
    assert lru > fetched + 0.05


def test_a_block_is_fetched_whole_if_most_of_it_is_used_before_it_would_go() -> None:
    assert worth_whole(75, 100, room=False)
    assert not worth_whole(74, 100, room=False)
    assert worth_whole(1, 100, room=True)
