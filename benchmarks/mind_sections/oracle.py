"""What a planner that knows the script could do: the best plan at each moment, by the planner's own cost.

It may choose which of the slots the job uses, who works for which stage, and where the model is cut, among
plans with the job's stages and as many instances as it has (and joined). It changes at once and for nothing,
so it bounds from above what any module can do. What it gains is relative: the job's steps before the script
set the scale.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.mind_sections.scenarios import Slot, SlotScripts
from entities.planner.search.layer_chain import LayerChain
from entities.planner.search.step_cost import InstanceKind, StepCost, StepSettings
from schemas.slot_conditions import SlotPhase, SlotScript
from schemas.task_graph import TaskGraph

OTHER_MS = 0.5
"""What the layers take that are not padded; a padded block computes about 1 ms beside its wait."""
OWN_MS = 1.0
CONSTANT_MS, INSTANCE_MS = 8.0, 6.5
"""Of a step, as the orchestrator plans (ADR-0077)."""


@dataclass(frozen=True)
class PaddedJob:
    """What the planner's cost depends on."""

    stages: int
    blocks: int
    pad_ms: float
    microbatches: int

    def chain(self) -> LayerChain:
        work = np.array([OTHER_MS, *[3 * self.pad_ms + OWN_MS] * self.blocks, OTHER_MS])
        few = np.full(len(work), 1e4)
        return LayerChain(
            names=tuple(map(str, range(len(work)))),
            work_ms=work,
            state_bytes=few,
            activation_bytes=few,
            reduction_bytes=few,
            crossing_bytes=np.full(len(work) + 1, 1e4),
            edges=tuple(range(len(work) + 1)),
        )

    def cost(self, kinds: Sequence[float]) -> StepCost:
        settings = StepSettings(
            microbatches=self.microbatches,
            link_bytes_per_s=1e9,
            constant_ms=CONSTANT_MS,
            instance_ms=INSTANCE_MS,
        )
        return StepCost(self.chain(), [InstanceKind(speed, 0) for speed in kinds], settings)


def present_step_ms(job: PaddedJob, graph: TaskGraph, speeds: Mapping[Slot, float]) -> float:
    """A step of the plan that the job has, on slots of these speeds."""
    places = {place.sid: (place.cluster, place.slot) for place in graph.placements}
    of_stage: list[list[float]] = [[] for _ in range(job.stages)]
    for unit in graph.units:
        if not unit.is_data:
            of_stage[unit.stage].append(speeds.get(places[unit.sid], 1.0))
    kinds = sorted({speed for group in of_stage for speed in group})
    groups = [tuple(group.count(kind) for kind in kinds) for group in of_stage]
    cuts = [graph.layers(stage) for stage in range(job.stages)]
    return job.cost(kinds).forecast(cuts, groups).step_ms


@cache
def best_step_ms(job: PaddedJob, speeds: tuple[float, ...], instances: int) -> float:
    """A step of the best plan with at most so many instances on slots of these speeds (ascending)."""
    kinds = sorted(set(speeds))
    cost, best = job.cost(kinds), np.inf
    tables: set[tuple[tuple[int, ...], ...]] = set()
    for places in itertools.product(range(job.stages + 1), repeat=len(speeds)):
        if sum(place < job.stages for place in places) > instances:
            continue
        rows = [[0] * len(kinds) for _ in range(job.stages)]
        for speed, place in zip(speeds, places, strict=True):
            if place < job.stages:
                rows[place][kinds.index(speed)] += 1
        table = tuple(map(tuple, rows))
        if table not in tables and all(map(any, table)):
            tables.add(table)
            best = min(best, cost.best_cut(table)[0])
    return float(best)


@dataclass(frozen=True, kw_only=True)
class Span:
    """From when on which slots the job may use, and how many instances it may have."""

    from_s: float
    slots: tuple[Slot, ...]
    instances: int


def moments(scripts: SlotScripts, spans: Iterable[Span], ends_s: float) -> list[float]:
    """When something changes between 0 and the end."""
    changes = {phase.at_s for phases in scripts.values() for phase in phases}
    changes |= {span.from_s for span in spans}
    return [0.0, *sorted(at for at in changes if 0.0 < at < ends_s), ends_s]


def speeds_at(scripts: SlotScripts, slots: Iterable[Slot], at_s: float) -> dict[Slot, float]:
    """What each slot is at a moment, rounded so that like slots are one kind."""
    return {slot: round(phase_at(scripts.get(slot, ()), at_s).speed, 2) for slot in slots}


def phase_at(phases: tuple[SlotPhase, ...], at_s: float) -> SlotPhase:
    """The phase that holds at a moment of the script."""
    return SlotScript(phases=phases).at(at_s)


@dataclass(frozen=True)
class PossibleSteps:
    """What was possible until the end, in seconds of the plan that the job had in the calm before.

    Times the steps per second of that calm, it is a number of steps.
    """

    best: float
    """By the best plan of each moment."""
    by_routes: float
    """By the plan that the job had, with microbatches shared out as well as can be: no weights do more."""


def possible_steps(
    job: PaddedJob, graph: TaskGraph, scripts: SlotScripts, spans: Sequence[Span], ends_s: float
) -> PossibleSteps:
    """What a planner that knows the script could do, and what whoever only routes could."""
    first = spans[0]
    calm_ms = present_step_ms(job, graph, speeds_at(scripts, first.slots, -1e-3))
    begins = [span.from_s for span in spans]
    changes = moments(scripts, spans, ends_s)
    best = by_routes = 0.0
    for at, until in itertools.pairwise(changes):
        span = spans[max(0, bisect_right(begins, at) - 1)]
        speeds = speeds_at(scripts, span.slots, at)
        best_ms = best_step_ms(job, tuple(sorted(speeds.values())), span.instances)
        here = speeds_at(scripts, first.slots, at)
        present_ms = present_step_ms(job, graph, here)
        by_routes += (until - at) * calm_ms / present_ms
        best += (until - at) * calm_ms / (min(best_ms, present_ms) if span is first else best_ms)
    return PossibleSteps(best, by_routes)


def gain_at(job: PaddedJob, graph: TaskGraph, scripts: SlotScripts, span: Span, at_s: float) -> float:
    """How fast the best plan for the slots as they are at a moment is, beside the calm before (1.0)."""
    calm_ms = present_step_ms(job, graph, speeds_at(scripts, span.slots, -1e-3))
    speeds = speeds_at(scripts, span.slots, at_s)
    return calm_ms / best_step_ms(job, tuple(sorted(speeds.values())), span.instances)
