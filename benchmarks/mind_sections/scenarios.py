"""What happens to a mesh while a job runs: scripts by slot, and things that are done to it, drawn by a seed.

Slots register the speed 1; what becomes of them is known to nobody but the oracle. Times are seconds after
the script's beginning, which is when the job has run undisturbed for a while; `lasts_s` is how long the
disturbance is, and half as long again is measured, so that what is slow to come back counts, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from schemas.slot_conditions import SlotPhase

Slot = tuple[str, int]
"""Cluster and number."""
SlotScripts = Mapping[Slot, tuple[SlotPhase, ...]]
Deed = Literal["join", "drain", "second job"]
ALWAYS_S = -1e6
"""The beginning of what holds from before the job on."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A mesh, a job, and what becomes of them.

    Attributes:
        what: One line.
        slots: How many each cluster has.
        stages, replicas, blocks: Of the job. Its gaps depend on them: who cuts eight blocks anew has choices.
        scripts: Seed and length (s) → phases of slots.
        deeds: What is done to the mesh, and when: parts of the length.
        joins: Whether a gain comes of more slots than before; these are counted apart.
    """

    what: str
    slots: Mapping[str, int] = field(default_factory=lambda: {"a": 5})
    stages: int = 2
    replicas: int | tuple[int, ...] | Mapping[str, int] = 2
    blocks: int = 8
    scripts: Callable[[int, float], SlotScripts] = lambda seed, lasts_s: {}
    deeds: tuple[tuple[float, Deed], ...] = ()
    joins: bool = False

    @property
    def bounded(self) -> bool:
        """Whether the best plan of one job bounds what can be done: two jobs fill each other's pauses."""
        return all(deed != "second job" for _, deed in self.deeds)


def _victim(seed: int, of: int = 4) -> Slot:
    """A slot that the job uses: it is placed in the first ones."""
    return "a", random.Random(f"victim {seed}").randrange(of)


def _slow(seed: int, lasts_s: float) -> SlotScripts:
    return {_victim(seed): (SlotPhase(speed=0.25), SlotPhase(at_s=lasts_s))}


def _throttled(seed: int, lasts_s: float) -> SlotScripts:
    """Down in three steps, and back as the device cools."""
    speeds = (0.8, 0.6, 0.4, 0.7, 1.0)
    moments = (0.0, 0.2, 0.4, 0.85, 1.0)
    return {
        _victim(seed): tuple(
            SlotPhase(at_s=part * lasts_s, speed=speed) for part, speed in zip(moments, speeds, strict=True)
        )
    }


def _bad_link(shape: SlotPhase) -> Callable[[int, float], SlotScripts]:
    """It comes three times and goes again."""

    def scripts(seed: int, lasts_s: float) -> SlotScripts:
        draw = random.Random(f"link {seed}")
        phases = []
        for turn in range(3):
            begins = (turn + 0.2 * draw.random()) * lasts_s / 3
            phases += [
                shape.model_copy(update={"at_s": begins}),
                SlotPhase(at_s=begins + draw.uniform(0.5, 0.75) * lasts_s / 3),
            ]
        return {_victim(seed): tuple(phases)}

    return scripts


def _noisy(seed: int, lasts_s: float) -> SlotScripts:
    """Bursts of one to four seconds that take half to three quarters of a device, with pauses between."""
    draw = random.Random(f"noise {seed}")
    phases, at = [], 0.0
    while at < lasts_s:
        phases.append(SlotPhase(at_s=at, speed=draw.uniform(0.25, 0.5)))
        at += draw.uniform(1.0, 4.0)
        phases.append(SlotPhase(at_s=at))
        at += draw.uniform(1.0, 4.0)
    return {_victim(seed): tuple(phases)}


def _unequal(seed: int, lasts_s: float) -> SlotScripts:
    """1, 1, 2, 2, 4 in drawn places, from before the job on."""
    speeds = [1.0, 1.0, 2.0, 2.0, 4.0]
    random.Random(f"unequal {seed}").shuffle(speeds)
    return {("a", slot): (SlotPhase(at_s=ALWAYS_S, speed=speed / 2),) for slot, speed in enumerate(speeds)}


SCENARIOS: dict[str, Scenario] = {
    "slow-device": Scenario(what="a device becomes 4× slower, and well again", scripts=_slow),
    "slow-stage": Scenario(
        what="the only device of a stage becomes 4× slower, and well again",
        slots={"a": 4},
        stages=4,
        replicas=1,
        blocks=12,
        scripts=_slow,
    ),
    "lone-device": Scenario(
        what="the only device of a stage becomes 4× slower, another is free, and it is well again",
        slots={"a": 5},
        stages=4,
        replicas=1,
        blocks=12,
        scripts=_slow,
    ),
    "throttling": Scenario(
        what="a device is throttled in steps, and cools",
        slots={"a": 6},
        stages=3,
        blocks=12,
        scripts=_throttled,
    ),
    "slow-link": Scenario(
        what="a link of 40 ms comes and goes", scripts=_bad_link(SlotPhase(latency_ms=40.0))
    ),
    "lossy-link": Scenario(
        what="a link that loses 2 % comes and goes", scripts=_bad_link(SlotPhase(loss=0.02))
    ),
    "noisy-neighbour": Scenario(what="bursts of another's load on a device", scripts=_noisy),
    "unequal": Scenario(
        what="devices of speeds 1, 1, 2, 2, 4, which no plan knows",
        replicas=(3, 2),
        blocks=12,
        scripts=_unequal,
    ),
    "join": Scenario(
        what="two workers join",
        slots={"a": 4},
        replicas={"min": 2, "want": 2, "max": 3},
        deeds=((0.0, "join"),),
        joins=True,
    ),
    "spot-notice": Scenario(
        what="the node of half of the job is drained, and another one has room",
        slots={"a": 4, "b": 4},
        deeds=((0.1, "drain"),),
    ),
    "two-jobs": Scenario(
        what="a second job like the first comes",
        slots={"a": 6},
        replicas={"min": 1, "want": 2, "max": 3},
        deeds=((0.1, "second job"),),
    ),
    "calm": Scenario(what="nothing happens"),
}
"""Name → scenario, in the order in which they run."""
