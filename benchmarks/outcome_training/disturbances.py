"""Jobs and what becomes of their devices, drawn by a seed. Slowness belongs to the slot: to a node here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from dmsc.simulation.scenarios.scenario import (
    Cluster,
    Event,
    Overheads,
    Scenario,
    ScenarioJob,
    ServiceTime,
    Slow,
    Stage,
)

STEPS = 100_000
"""More than any run gets to."""
KINDS: dict[str, float] = {
    "calm": 0.1,
    "slow": 0.28,
    "throttled": 0.17,
    "noisy": 0.25,
    "unequal": 0.12,
    "everybody": 0.08,
}
"""Kind of disturbance → how often. `everybody`: all devices at once, so that no change helps."""
BEGINS_S = 8.0, 20.0


@dataclass(frozen=True, kw_only=True)
class DisturbedJob:
    """A scenario without changes; `begins_s` is when something becomes of a device, if anything does."""

    scenario: Scenario
    kind: str
    room: bool
    begins_s: float


def disturbed_job(seed: int, kind: str = "", lasts_s: float = 60.0) -> DisturbedJob:
    """The job of a seed, of one kind if named."""
    draw = random.Random(f"change outcomes {seed}")
    drawn = draw.choices(list(KINDS), list(KINDS.values()))[0]
    kind = kind or drawn
    stages = draw.choice((2, 2, 2, 3, 3, 4))
    replicas = [draw.choice((1, 2, 2, 3)) if draw.random() < 0.3 else 2 for _ in range(stages)]
    if draw.random() < 0.2:
        replicas = [1] * stages
    base_ms = math.exp(draw.uniform(math.log(35), math.log(130)))
    scatter = math.exp(draw.uniform(math.log(0.01), math.log(0.15)))
    speeds = [[1.0] * count for count in replicas]
    if kind == "unequal":
        speeds = [[draw.choice((0.25, 0.5, 0.5, 1.0, 1.0)) for _ in range(count)] for count in replicas]
    parts = []
    for count, own in zip(replicas, speeds, strict=True):
        uneven = draw.uniform(1.3, 2.0) if draw.random() < 0.1 else draw.uniform(0.95, 1.05)
        took = base_ms * uneven
        parts.append(
            Stage(
                replicas=count,
                forward_ms=ServiceTime(mean_ms=took / 3, distribution="gamma", cv=scatter),
                backward_ms=ServiceTime(mean_ms=2 * took / 3, distribution="gamma", cv=scatter),
                output_bytes=1e4,
                parameter_bytes=1e5,
                speeds=tuple(own),
            )
        )
    nodes = sum(replicas)
    begins_s = draw.uniform(*BEGINS_S)
    events: list[Event] = []
    for victim in draw.sample(range(nodes), 2 if nodes > 2 and draw.random() < 0.2 else 1):
        events += DISTURBANCES.get(kind, _nothing)(draw, f"a/node-{victim}", begins_s, lasts_s)
    if draw.random() < 0.25:  # the machine of all slots pauses now and then
        events += _pauses(draw, lasts_s)
    job = ScenarioJob(
        name="j",
        steps=STEPS,
        microbatches=draw.choice((8, 12, 12, 12, 16, 24)),
        stages=tuple(parts),
        data_instances=1,
    )
    overheads = Overheads(
        hop_ms=draw.uniform(1, 3),
        compute_ms=draw.uniform(0.2, 1.5),
        begin_ms=draw.uniform(3, 8),
        prepare_ms=draw.uniform(5, 15),
        commit_ms=draw.uniform(5, 15),
        start_s=math.exp(draw.uniform(math.log(0.8), math.log(4))),
    )
    scenario = Scenario(
        name="change-outcomes",
        seed=seed,
        clusters=(Cluster(name="a", nodes=nodes + 12),),
        jobs=(job,),
        events=tuple(sorted(events, key=lambda event: event.at_s)),
        overheads=overheads,
        limit_s=lasts_s,
    )
    return DisturbedJob(scenario=scenario, kind=kind, room=draw.random() < 0.75, begins_s=begins_s)


# --- kinds ------------------------------------------------------------------------------------------------
def _nothing(draw: random.Random, node: str, begins_s: float, lasts_s: float) -> list[Event]:
    return []


def _slow(draw: random.Random, node: str, begins_s: float, lasts_s: float) -> list[Event]:
    factor = math.exp(draw.uniform(math.log(1.3), math.log(6)))
    for_s = None if draw.random() < 0.25 else math.exp(draw.uniform(math.log(1.5), math.log(60)))
    return [Slow(at_s=begins_s, target=node, factor=factor, for_s=for_s)]


def _throttled(draw: random.Random, node: str, begins_s: float, lasts_s: float) -> list[Event]:
    """Down in steps, each by a factor, and back in steps."""
    events: list[Event] = []
    at_s, ends_s = begins_s, begins_s + draw.uniform(8, 40)
    for _ in range(draw.choice((2, 3, 3, 4))):
        if at_s < ends_s:
            factor = draw.uniform(1.15, 1.7)
            until_s = ends_s + draw.uniform(-0.15, 0.15) * (ends_s - begins_s)
            events.append(Slow(at_s=at_s, target=node, factor=factor, for_s=max(0.5, until_s - at_s)))
            at_s += draw.uniform(1.5, 8)
    return events


def _noisy(draw: random.Random, node: str, begins_s: float, lasts_s: float) -> list[Event]:
    """Bursts of another's load, with pauses between."""
    events: list[Event] = []
    longer, at_s, ends_s = draw.uniform(0.6, 1.6), begins_s, begins_s + draw.uniform(8, 60)
    while at_s < min(ends_s, lasts_s):
        for_s = longer * draw.uniform(1, 4)
        events.append(Slow(at_s=at_s, target=node, factor=1 / draw.uniform(0.25, 0.6), for_s=for_s))
        at_s += for_s + longer * draw.uniform(1, 4)
    return events


def _everybody(draw: random.Random, node: str, begins_s: float, lasts_s: float) -> list[Event]:
    return [event.model_copy(update={"target": "a"}) for event in _slow(draw, node, begins_s, lasts_s)]


def _pauses(draw: random.Random, lasts_s: float) -> list[Event]:
    events: list[Event] = []
    at_s = draw.uniform(1, 8)
    while at_s < lasts_s:
        events.append(
            Slow(at_s=at_s, target="a", factor=draw.uniform(1.2, 2.5), for_s=draw.uniform(0.2, 1.0))
        )
        at_s += draw.expovariate(1 / 6) + 1
    return events


DISTURBANCES: dict[str, Callable[[random.Random, str, float, float], list[Event]]] = {
    "slow": _slow,
    "throttled": _throttled,
    "noisy": _noisy,
    "everybody": _everybody,
}
