"""Schedules of re-cuts (ADR-0090): whoever dies when, it ends in one of the plans, with the same bits."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import pytest

from tests.sim.recuts import RecutWorld

SCHEDULES = int(os.environ.get("DMSC_SIM_SCHEDULES", "50")) // 8
"""Per kind, with seeds 0, 1, …; more than `KNOWN` are drawn anew. `DMSC_SIM_SEED=N` runs that one alone."""
KNOWN = 20

KINDS = {
    "quiet": {},
    "kills": {"kills": 4},
    "takeovers": {"takeovers": 4},
    "replicas": {"replicas": 2, "kills": 4},
    "mixed": {"replicas": 2, "kills": 3, "takeovers": 3},
}


def _seeds() -> list[int]:
    fixed = os.environ.get("DMSC_SIM_SEED")
    if fixed is not None:
        return [int(fixed)]
    return [*range(min(SCHEDULES, KNOWN)), *(random.randrange(1 << 32) for _ in range(SCHEDULES - KNOWN))]


@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_in_one_of_the_plans(kind: str) -> None:
    seen: Counter[str] = Counter()
    for seed in _seeds():
        world = RecutWorld(seed, **KINDS[kind])
        try:
            asyncio.run(asyncio.wait_for(world.run(steps=16, recuts=5), 60.0))
        except BaseException:
            print("seed", seed, "struck:", world.struck)
            raise
        seen.update(done=world.done, dropped=world.dropped, struck=len(world.struck))
    print(kind, dict(seen))
    assert seen["done"] > 0
    if kind == "quiet":
        assert seen["dropped"] == 0
    else:
        assert seen["struck"] > 0
        assert seen["dropped"] > 0
