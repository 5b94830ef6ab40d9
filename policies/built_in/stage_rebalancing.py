"""Suggests that an instance changes its stage, if one stage delays all others (SWARM §3.2).

`policies.numerics.allocation.stage_balance` predicts the effect; this policy provides its input and decides
when the input can be trusted: the same members for some steps, every working instance measured, medians
instead of means. The orchestrator carries a move out, measures its effect, and reports it in the job's
events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

import numpy as np

from bus.subject_row import Subject
from bus.subjects import COMPUTE
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import InstanceView, JobView
from policies.numerics.allocation.stage_balance import (
    MoveLimits,
    Proposal,
    Situation,
    StageSituation,
    Worker,
    best_move,
)
from policies.numerics.features import Floats
from schemas.job import JobState, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRebalancingConfig:
    """The evidence that a move needs. `MoveLimits` has the gain that it needs."""

    min_steps: int = 8
    """Steps in a row by the same instances. Fewer reacts sooner, also to passing changes."""

    min_samples: int = 4
    """Samples of each working instance, in its present incarnation."""

    recent: int = 16
    """Samples whose median is a service time."""

    retry_s: float = 10.0
    """Seconds until a suggestion is made again, whatever the decision on it."""

    limits: MoveLimits = field(default_factory=MoveLimits)


class StageRebalancing(Policy):
    """Moves one instance from the stage that can best spare it to the slowest stage, if that pays."""

    name: ClassVar[str] = "stage-rebalancing"
    version: ClassVar[str] = "1"

    def __init__(self, config: StageRebalancingConfig | None = None) -> None:
        self.config = config or StageRebalancingConfig()

    def subscribes(self) -> tuple[Subject, ...]:
        return (COMPUTE,)

    def decide(self, view: JobView, now: float) -> Suggestions:
        if not view.is_due("move", now, self.config.retry_s):
            return None
        situation = self._situation(view, now)
        if situation is None:
            return None
        proposal = best_move(situation, self.config.limits)
        if isinstance(proposal, str):
            return None
        return self.move(
            view,
            proposal.sid,
            proposal.to_stage,
            proposal.forecast,
            reason=_reason(proposal, situation),
            confidence=self._confidence(view, situation),
        )

    def _situation(self, view: JobView, now: float) -> Situation | None:
        """The job's situation; None while evidence is missing, or instances are joining or leaving."""
        steps = self._steady_steps(view)
        if view.state not in (None, JobState.RUNNING):  # None: it ran before this module did
            return None
        if len(steps) < self.config.min_steps or not view.total_steps:
            return None
        stages: dict[int, StageSituation] = {}
        for stage in view.stages:
            workers = [instance for instance in view.stage(stage, now) if instance.weight > 0]
            if any(worker.samples < self.config.min_samples for worker in workers):
                return None
            stages[stage] = self._stage(view, workers)
        sids = {worker.sid for state in stages.values() for worker in state.workers}
        if not stages or sids != {sid for sid, share in steps[-1].shares.items() if share or sid in sids}:
            return None
        return Situation(
            stages=stages,
            microbatches=sum(steps[-1].shares.values()) // len(stages),
            step_s=median(result.step_s for result in steps),
            steps_left=view.total_steps - view.step - 1,
            bytes_per_s=_bytes_per_s(view),
        )

    def _steady_steps(self, view: JobView) -> list[StepResult]:
        """The last steps in a row that the same instances did."""
        steps: list[StepResult] = []
        for event in reversed(view.events):
            if event.change is not None:
                break  # steps before a change do not describe the present
            if event.result is None:
                continue
            if steps and event.result.shares.keys() != steps[0].shares.keys():
                break
            steps.append(event.result)
        return steps[::-1]

    def _stage(self, view: JobView, workers: Sequence[InstanceView]) -> StageSituation:
        samples = [worker.sample for worker in workers if worker.sample is not None]
        sids = [worker.sid for worker in workers]
        times = np.nanmedian(self._recent(view, sids), axis=1) if sids else ()
        return StageSituation(
            workers=tuple(Worker(sid=sid, service_ms=float(ms)) for sid, ms in zip(sids, times, strict=True)),
            cost_ms=max((sample.stage_cost_ms for sample in samples), default=0.0),
            state_bytes=max((sample.state_bytes for sample in samples), default=0),
        )

    def _recent(self, view: JobView, sids: list[str]) -> Floats:
        """The latest service times, shape `(sids, recent)`."""
        return view.series("service_ms", sids)[:, -self.config.recent :]

    def _confidence(self, view: JobView, situation: Situation) -> float:
        """0.5…0.95, lower the more the service times scatter about their medians."""
        sids = [worker.sid for state in situation.stages.values() for worker in state.workers]
        recent = self._recent(view, sids)
        usual = np.nanmedian(recent, axis=1, keepdims=True)
        scatter = float(np.nanmax(np.nanmedian(np.abs(recent - usual) / usual, axis=1)))
        return round(float(np.clip(0.95 - scatter, 0.5, 0.95)), 3)


def _bytes_per_s(view: JobView) -> float:
    """Median transfer rate over the links in instances' last samples; NaN if nothing was sent."""
    rates = []
    for instance in view.instances.values():
        links = () if instance.sample is None else instance.sample.links
        sent = sum(link.sent_bytes + link.received_bytes for link in links)
        took_ms = sum(link.transfer_ms for link in links)
        if sent > 0 and took_ms > 0:
            rates.append(1e3 * sent / took_ms)
    return median(rates) if rates else float("nan")


def _reason(proposal: Proposal, situation: Situation) -> str:
    stages = ", ".join(
        f"stage {stage}: {len(state.workers)} × {median(w.service_ms for w in state.workers):.1f} ms"
        for stage, state in situation.stages.items()
    )
    forecast = proposal.forecast
    return (
        f"{stages}; with {proposal.sid} in stage {proposal.to_stage} a step would take "
        f"{forecast.step_after_s:.3f} s instead of {forecast.step_before_s:.3f} s "
        f"(bound {proposal.bound_before:.1f} → {proposal.bound_after:.1f} microbatches/s), "
        f"for at most {forecast.cost_s:.1f} s; {forecast.gain_s:.1f} s in the {forecast.steps_left} steps "
        "that are left"
    )
