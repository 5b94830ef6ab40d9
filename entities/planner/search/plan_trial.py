"""Candidates for a plan, and their trial: a judge simulates some steps of the best ones (ADR-0077)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from entities.planner.plan_request import PlanRequest
from entities.planner.search.instance_assignment import AssignedStages
from entities.planner.search.step_cost import StepCost, StepForecast

JUDGED = 8
"""Candidates, at most, whose step is simulated."""
MOST_JUDGED = 60_000
"""Microbatches × stages that are simulated for all candidates of one plan, at most: about a second."""
TRIAL_STEPS = 4
FEW_INSTANCES = 16
"""The speeds of so many are named."""


@dataclass(frozen=True, kw_only=True)
class TrialStage:
    """One stage, with the speeds of its instances. Milliseconds of a microbatch at speed 1, and its bytes."""

    work_ms: float
    output_bytes: float
    sums_bytes: float
    speeds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PlanTrial:
    """A plan to try. `constant_ms`: of a step, beside all that is simulated."""

    stages: tuple[TrialStage, ...]
    microbatches: int
    steps: int
    data_instances: int
    link_bytes_per_s: float
    hop_ms: float
    constant_ms: float


Judge = Callable[[PlanTrial], float]
"""What a step of a plan takes in trial steps, ms. Who composes the processes gives it: it is made of parts
that this package may not import (`dmsc.planning.plan_judge`)."""


@dataclass(frozen=True)
class PlanCandidate:
    """An assignment, cut at all edges, with its forecast."""

    found: AssignedStages
    forecast: StepForecast
    simulated: bool = False

    @property
    def shape(self) -> str:
        """In words: `2 stages of 3 and 2 instances`."""
        counts = [sum(group) for group in self.found.groups]
        stages = f"{len(counts)} stage{'s' if len(counts) > 1 else ''}"
        speeds = [
            sorted((kind.speed for kind, n in stage.instances for _ in range(n)), reverse=True)
            for stage in self.forecast.stages
        ]
        if len({speed for stage in speeds for speed in stage}) > 1 and sum(counts) <= FEW_INSTANCES:
            shown = " | ".join(", ".join(f"{speed:g}" for speed in stage) for stage in speeds)
            return f"{stages}, instances of speeds {shown}"
        if len(set(counts)) == 1:
            return f"{stages} of {counts[0]} instance{'s' if counts[0] > 1 else ''}"
        return f"{stages} of {', '.join(map(str, counts[:-1]))} and {counts[-1]} instances"


def judged(
    fitting: Sequence[PlanCandidate], fine: StepCost, request: PlanRequest, judge: Judge
) -> list[PlanCandidate]:
    """The best candidates, each with the step of its trial. What the formula leaves out is in it: what
    instances wait for each other beyond the fill, and what they save by working ahead.

    If one of them is too large for a trial none is tried: a simulated step says nothing beside one by the
    formula.
    """
    best = sorted(fitting, key=lambda candidate: candidate.found.step_ms)[:JUDGED]
    largest = max(len(candidate.found.groups) for candidate in best)
    if request.microbatches * largest * TRIAL_STEPS > MOST_JUDGED / len(best):
        return list(fitting)
    found: list[PlanCandidate] = []
    for candidate in best:
        before = candidate.forecast
        step_ms = judge(_trial(candidate, request, fine))
        beside = before.bottleneck_ms + before.reduction_ms + before.constant_ms
        forecast = replace(before, step_ms=step_ms, fill_ms=step_ms - beside)
        found.append(PlanCandidate(replace(candidate.found, step_ms=step_ms), forecast, simulated=True))
    return found


def _trial(candidate: PlanCandidate, request: PlanRequest, fine: StepCost) -> PlanTrial:
    chain = fine.chain
    return PlanTrial(
        stages=tuple(
            TrialStage(
                work_ms=float(chain.work_ms[stage.first : stage.last].sum()),
                output_bytes=float(chain.crossing_bytes[stage.last]),
                sums_bytes=float(chain.reduction_bytes[stage.first : stage.last].sum()),
                speeds=tuple(kind.speed for kind, count in stage.instances for _ in range(count)),
            )
            for stage in candidate.forecast.stages
        ),
        microbatches=request.microbatches,
        steps=TRIAL_STEPS,
        data_instances=max(1, min(len(request.clusters), sum(candidate.found.groups[0]))),
        link_bytes_per_s=request.link_bytes_per_s,
        hop_ms=request.hop_ms,
        constant_ms=candidate.forecast.constant_ms,
    )
