"""Schedules of the step transaction: whatever is killed, the weights are those of a quiet run."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from tests.sim.arithmetic import Violation
from tests.sim.world import Plan, World

SCHEDULES = int(os.environ.get("DMSC_SIM_SCHEDULES", "50"))
"""Per kind of plan, with seeds 0, 1, …; more than that many are drawn anew each time.

`DMSC_SIM_SEED=N pytest tests/sim` runs that one alone, with its trace.
"""
KNOWN = 100

PLANS = {
    "quiet": Plan(drop=0.0, kills=0, freezes=0),
    "lossy": Plan(drop=0.3, kills=0, freezes=0),
    "kills": Plan(kills=3, freezes=0),
    "freezes": Plan(kills=0, freezes=3),
    "mixed": Plan(stages=3, replicas=2, data=2, kills=3, freezes=2, microbatches=6),
    "one replica": Plan(replicas=1, kills=2, freezes=0),
    "cuts": Plan(kills=1, freezes=0, cuts=3),
    "pauses": Plan(kills=2, freezes=1, pause_every=2),
    "takeovers": Plan(kills=1, freezes=1, takeovers=2),
    "roll-backs": Plan(kills=3, freezes=1, rollbacks=2, data=2, steps=6),
    "joins": Plan(kills=2, freezes=1, joins=2, steps=6, state_s=(0.1, 0.5), redo_s=(0.005, 0.05)),
    "layouts": Plan(kills=2, freezes=1, joins=1, takeovers=1, layouts=5, steps=6),
    "slow joins": Plan(kills=1, freezes=0, joins=1, steps=16, state_s=(1.2, 2.0), redo_s=(0.3, 0.5)),
    "tied stages": Plan(
        stages=3, replicas=2, kills=3, freezes=1, joins=1, tied=((0, 2),), state_s=(0.1, 0.5)
    ),
    "tied stages, one replica": Plan(stages=3, replicas=1, kills=3, freezes=1, tied=((0, 1, 2),)),
    "tied stages, takeovers": Plan(
        stages=3, replicas=2, kills=2, freezes=1, cuts=1, takeovers=2, joins=1, tied=((0, 2),)
    ),
    "tied stages, roll-backs": Plan(
        stages=4, replicas=2, kills=3, freezes=2, rollbacks=1, pause_every=3, steps=6, tied=((0, 3), (1, 2))
    ),
    "joins and takeovers": Plan(
        kills=1, freezes=1, joins=2, takeovers=2, steps=6, state_s=(0.05, 0.4), redo_s=(0.005, 0.1)
    ),
}

SEEN = {
    "kills": ("last redo", "redos"),
    "joins": ("last redo", "redos", "steps beside a snapshot"),
    "slow joins": ("last redo", "redos", "steps beside a snapshot", "slow", "held"),
    "joins and takeovers": ("last redo", "redos", "steps beside a snapshot"),
}
"""What must have happened to newcomers in some schedule of a plan (`transfers.Transfers.seen`)."""


def _seeds() -> list[int]:
    return [*range(min(SCHEDULES, KNOWN)), *(random.randrange(1 << 32) for _ in range(SCHEDULES - KNOWN))]


@pytest.mark.parametrize("kind", PLANS)
def test_the_weights_are_those_of_a_quiet_run(kind: str) -> None:
    fixed = os.environ.get("DMSC_SIM_SEED")
    seeds = [int(fixed)] if fixed else _seeds()
    fired = replays = 0
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, PLANS[kind])
        try:
            world.run()
        except Exception as error:
            trace = "\n".join(world.log[-400:])
            pytest.fail(f"seed {seed} of plan {kind}: {type(error).__name__}: {error}\n{trace}")
        fired += len(world.fired)
        replays += world.replays
        seen += world.transfers.seen
    expected = PLANS[kind].kills + PLANS[kind].freezes + PLANS[kind].cuts
    if expected and not fixed:
        assert fired, "no fault ever fired"
        assert replays, "nothing was ever replayed"
    if not fixed:
        assert not [what for what in SEEN.get(kind, ()) if not seen[what]], seen


def test_a_violation_is_found() -> None:
    """The harness itself: a sum that is counted twice must not go unseen."""
    world = World(1, PLANS["quiet"])
    node = next(node for node in world.nodes.values() if node.stage == 0)
    node.weights += 1
    with pytest.raises(Violation):
        world.run()
