"""Suggests that a slow instance leaves its slot, or its stage, if a trained network forecasts that it pays.

What present times say of a change is a formula, and any rule can have it. What they do not say is how long a
slow spell will last, given how it began and what came before it, and what the change itself will cost while
it is made. `policies.numerics.allocation.outcome_network` has learnt both from simulated jobs in which the
same change was made and was not made. This policy makes the job's graph (`change_graphs`), asks the network
for each candidate, and suggests the best one, if it is likely enough to pay within the network's horizon.

"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import numpy as np

from bus.subject_row import Subject
from bus.subjects import COMPUTE
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import InstanceView, JobView
from policies.numerics.allocation.change_graphs import (
    CandidateChange,
    MeasuredJob,
    change_graphs,
    doubt_about,
)
from policies.numerics.allocation.outcome_network import ChangeOutcome, OutcomeNetwork, trained
from schemas.changes import Forecast
from schemas.job import JobState, StepResult
from schemas.policy import PolicySuggestion
from schemas.registry import ServiceRecord
from schemas.routing import MEASURING
from schemas.task_graph import is_data


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeOutcomesConfig:
    """When a forecast is worth a change."""

    min_steps: int = 4
    """Steps in a row by the same instances. Fewer reacts sooner, also to what follows a change."""

    min_samples: int = 3
    """Samples of each working instance, in its present incarnation."""

    least_gain: float = 0.03
    """Of the steps in the network's horizon: less is not worth a change."""

    least_sure: float = 0.75
    """Probability, as calibrated, that the change gains anything in that time."""

    least_saving: float = 0.1
    """Of a step: the orchestrator declines a change of instances for less."""

    retry_s: float = 5.0
    """Seconds until a suggestion is made again, whatever the decision on it."""

    valid_s: float = 5.0
    """Seconds for which a suggestion holds: it is about the present."""

    doubt_s: float = 60.0
    """Seconds between two notes that measurements can't be used."""


class ChangeOutcomes(Policy):
    """Asks a trained graph network what comes of each change of instances, and suggests the best one."""

    name: ClassVar[str] = "change-outcomes"
    version: ClassVar[str] = "1"
    every_s: ClassVar[float] = 0.5

    def __init__(
        self, config: ChangeOutcomesConfig | None = None, network: OutcomeNetwork | None = None
    ) -> None:
        self.config = config or ChangeOutcomesConfig()
        self.network = network or trained()

    def subscribes(self) -> tuple[Subject, ...]:
        return (COMPUTE,)

    def decide(self, view: JobView, now: float) -> Suggestions:
        config = self.config
        if view.state not in (None, JobState.RUNNING) or not view.is_due("move", now, config.retry_s):
            return None
        if any(view.algorithms.get(stage, MEASURING[0]) not in MEASURING for stage in view.stages):
            return None  # the network has seen no other
        job = measured_job(view, now, config)
        if job is None:
            return None
        if doubt := doubt_about(job):
            if not view.is_due("note", now, config.doubt_s):
                return None
            return self.note(view, f"no forecast: {doubt}")
        candidates, graphs = change_graphs(job)
        if not candidates:
            return None
        forecasts = list(zip(candidates, self.network.outcomes(graphs), strict=True))
        worth = [each for each in forecasts if self._is_worth(each[1])]
        if not worth:
            return None
        candidate, outcome = max(
            worth, key=lambda each: (each[1].gain.mean, job.sids[each[0].node], each[0].stage)
        )
        return self._suggestion(view, job, candidate, outcome)

    def _is_worth(self, outcome: ChangeOutcome) -> bool:
        config = self.config
        return (
            outcome.gain.ratio >= 1 + config.least_gain
            and outcome.gain.above(0.0) >= config.least_sure
            and outcome.step.ratio <= 1 - config.least_saving
        )

    def _suggestion(
        self, view: JobView, job: MeasuredJob, candidate: CandidateChange, outcome: ChangeOutcome
    ) -> PolicySuggestion:
        sid, sure = job.sids[candidate.node], outcome.gain.above(0.0)
        horizon_s = self.network.horizon_s
        forecast = forecast_of(job, outcome, view.total_steps - view.step - 1, horizon_s)
        gain = outcome.gain
        low, high = (math.exp(gain.mean + side * 1.2816 * gain.width) - 1 for side in (-1, 1))
        where = "another slot" if candidate.migrates else f"stage {view.stages[candidate.stage]}"
        reason = (
            f"{sid} to {where}: {gain.ratio - 1:+.0%} steps ({low:+.0%} to {high:+.0%}) in the next "
            f"{horizon_s:.0f} s, a step of {forecast.step_after_s:.3f} s instead of "
            f"{forecast.step_before_s:.3f} s; it pays with a probability of {sure:.0%}"
        )
        confidence, valid_s = round(min(sure, 0.99), 3), self.config.valid_s
        if candidate.migrates:
            return self.migrate(view, sid, forecast, reason=reason, confidence=confidence, valid_s=valid_s)
        stage = view.stages[candidate.stage]
        return self.move(view, sid, stage, forecast, reason=reason, confidence=confidence, valid_s=valid_s)


def forecast_of(job: MeasuredJob, outcome: ChangeOutcome, steps_left: int, horizon_s: float) -> Forecast:
    """The forecast in the orchestrator's words: it promises nothing beyond the network's horizon.

    Its cost is what the horizon loses beside what each of its steps gains.
    """
    before_s = step_now_s(job.steps_s)
    after_s = before_s * outcome.step.ratio
    steps = min(max(steps_left, 0), math.ceil(horizon_s / after_s))
    lost_s = horizon_s * (1 - outcome.gain.ratio * outcome.step.ratio)
    return Forecast.of(before_s, after_s, cost_s=min(max(lost_s, 0.0), horizon_s), steps_left=steps)


AGREES = 1.4
"""How far a step's present time may be from the median of the last eight, which the orchestrator takes."""


def step_now_s(steps_s: Sequence[float]) -> float:
    """What a step takes now: the median of the last three, not too far from that of the last eight."""
    usual_s = median(steps_s[-8:])
    return min(max(median(steps_s[-3:]), usual_s / AGREES), usual_s * AGREES)


def measured_job(
    view: JobView, now: float, config: ChangeOutcomesConfig = ChangeOutcomesConfig()
) -> MeasuredJob | None:
    """The job as measured; None while evidence is missing, or instances are joining or leaving."""
    steps = steady_steps(view)
    if len(steps) < config.min_steps:
        return None
    crew = {sid for sid, share in steps[-1].shares.items() if share}
    workers: list[InstanceView] = []
    for stage in view.stages:
        here = [one for one in view.stage(stage, now) if one.weight > 0]
        if not here or any(one.samples < config.min_samples for one in here):
            return None
        workers += here
    sids = [one.sid for one in workers]
    if not sids or any(sid not in sids and sid in view.instances for sid in crew - _entries(view)):
        return None
    places = {stage: place for place, stage in enumerate(view.stages)}
    free = view.free_slots()
    return MeasuredJob(
        sids=tuple(sids),
        stages=np.array([places[one.stage] for one in workers]),
        service_ms=view.series("service_ms", sids),
        times_s=view.panel.times(sids),
        latest_ms=tuple(math.nan if one.sample is None else one.sample.service_ms for one in workers),
        counts=view.series("microbatches", sids),
        work=tuple(_work_ms(workers, stage) for stage in view.stages),
        steps_s=tuple(result.step_s for result in steps),
        microbatches=max(1, _microbatches(steps[-1], workers, view.stages)),
        room=bool(free),
        room_speed=_room_speed(view, free, sids),
        moves=True,
        now_s=now,
    )


def steady_steps(view: JobView) -> list[StepResult]:
    """The last steps in a row that the same instances did, oldest first, without those under a change."""
    steps: list[StepResult] = []
    for event in reversed(view.events):
        if event.change is not None or event.kind in ("fault", "recovery", "recut"):
            break
        if event.result is None:
            continue
        if steps and event.result.shares.keys() != steps[0].shares.keys():
            break
        steps.append(event.result)
    return steps[::-1]


# --- parts ------------------------------------------------------------------------------------------------
def _entries(view: JobView) -> set[str]:
    return {sid for sid, one in view.instances.items() if is_data(one.stage)}


def _microbatches(step: StepResult, workers: Sequence[InstanceView], stages: Sequence[int]) -> int:
    of = {one.sid for one in workers}
    return sum(share for sid, share in step.shares.items() if sid in of) // max(1, len(stages))


def _work_ms(workers: Sequence[InstanceView], stage: int) -> float:
    costs = [one.sample.stage_cost_ms for one in workers if one.stage == stage and one.sample is not None]
    return max((cost for cost in costs if math.isfinite(cost)), default=0.0)


def _room_speed(view: JobView, free: dict[str, int], sids: Sequence[str]) -> float:
    """The slowest slot with room, by its registration, relative to the fastest that the job has."""

    def speeds(record: ServiceRecord | None) -> list[float]:
        offers = () if record is None else (record.offers or (record.capability,))
        return [offer.speed.get("stage", 1.0) for offer in offers]

    there = [speed for agent in free for speed in speeds(view.record(agent))]
    here = [speed for sid in sids for speed in speeds(view.record(sid))]
    ratio = min(there, default=1.0) / max(here, default=1.0) if min(here, default=1.0) > 0 else 1.0
    return min(max(ratio, 0.05), 20.0)
