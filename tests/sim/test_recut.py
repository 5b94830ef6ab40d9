"""Schedules of re-cuts (ADR-0090): whoever dies when, it ends in one of the plans, with the same bits."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.sim.recut_strikes import WHERE
from tests.sim.recuts import RecutWorld

ALL = int(os.environ.get("DMSC_RECUT_SCHEDULES", "0"))
"""Schedules of all kinds together, drawn anew each time (`make test-recut-schedules`); 0: some known ones.

Each fault must then have struck in each of its phases. `DMSC_SIM_SEED=N` runs that one of each kind alone.
"""
KNOWN = 2

KINDS: dict[str, dict[str, Any]] = {
    "quiet": {},
    "deaths": {"member": 2, "data": 1},
    "leaders and deaths": {"member": 2, "leader": 3},
    "leaders": {"leader": 3},
    "lost messages": {"restart": 2, "silence": 1},
    "replicas": {"replicas": 2, "member": 3, "data": 1},
    "mixed": {"replicas": 2, "member": 2, "leader": 2, "data": 1, "restart": 1, "silence": 1},
}
GO_BACK = {"deaths", "leaders and deaths"}
"""Kinds of jobs that often lose all members of a stage, and then go back to a checkpoint."""
RECUTS = (0, 1, 10)


@cache
def undisturbed() -> str:
    """The SHA-256 of the weights of a job that nobody disturbs, nor cuts anew: that of all schedules."""
    return _ran(0, "quiet", 0).sha256


def _seeds() -> list[int]:
    fixed = os.environ.get("DMSC_SIM_SEED")
    if fixed is not None:
        return [int(fixed)]
    if not ALL:
        return [*range(KNOWN)]
    count = -(-ALL // (len(KINDS) * len(RECUTS)))
    return [random.randrange(1 << 32) for _ in range(count)]


def _ran(seed: int, kind: str, recuts: int) -> RecutWorld:
    world = RecutWorld(seed, **KINDS[kind])
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what is logged
            asyncio.run(asyncio.wait_for(world.run(recuts), PATIENCE_S))
    except BaseException:
        print(f"seed {seed}, {kind}, {recuts} re-cuts; struck:", dict(world.strikes.fired))
        raise
    return world


@pytest.mark.parametrize("recuts", RECUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_in_one_of_the_plans(kind: str, recuts: int) -> None:
    seeds = _seeds() if recuts or ALL else _seeds()[:1]
    fired: Counter[str] = Counter()
    states: Counter[str] = Counter()
    roll_backs = 0
    for seed in seeds:
        world = _ran(seed, kind, recuts)
        fired += world.strikes.fired
        states += world.states
        roll_backs += world.roll_backs
        if world.sha256 != undisturbed():
            pytest.fail(f"other weights with seed {seed}: {kind}, {recuts} re-cuts; {world.strikes.fired}")
    counts = {str(state): count for state, count in states.items()}
    print(
        f"{kind}, {recuts} re-cuts: {len(seeds)} schedules {counts}, {roll_backs} roll-backs; seeds {seeds}"
    )
    print(f"  the weights of all: {undisturbed()}")
    for what, count in sorted(fired.items()):
        print(f"  {count:5} {what}")
    if kind == "quiet":
        assert states == ({"done": recuts * len(seeds)} if recuts else {})
    elif len(seeds) > 1:
        assert fired
        assert recuts < 2 or states["done"] > 0
    if ALL and recuts == max(RECUTS):
        _each_struck(fired, {what for what in KINDS[kind] if what in WHERE}, kind in GO_BACK)


def _each_struck(fired: Counter[str], kinds: set[str], go_back: bool) -> None:
    """Each fault has struck in each of its phases, before and after; in those of going back where jobs do."""
    struck = Counter[str]()
    for said, count in fired.items():
        who, where = said.split(": ")
        struck[f"{who if who in WHERE else 'member'}: {where}"] += count
    expected = {
        f"{kind}: {phase}, {when}"
        for kind in kinds
        for phase in WHERE[kind]
        for when in ("before", "after")
        if go_back or phase != "restore"
    }
    assert not expected - struck.keys()
