"""Weights in addition to the job's routing algorithm, tried out by step times (a contextual bandit).

Arm 0 leaves the algorithm alone. The others tilt a stage's weights by its instances' speed: weight ∝ speed to
the power of `TILTS`. An algorithm that measures speed itself takes that as a correction: above 0 slow
instances get even less, below 0 more. Step times decide which is best; `conservative_bandit` keeps the cost
of all trials below `margin` of the time of the algorithm alone. Contexts, the inequality of the instances,
are kept apart. One arm holds for a block of steps, of which the first are ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from policies.built_in.stage_weights import present_shares
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.numerics.conservative_bandit import ConservativeBandit
from policies.numerics.features import Floats, shares
from schemas.job import ENDED, JobEvent
from schemas.policy import PolicyDecision, PolicySuggestion
from schemas.task_graph import is_data
from schemas.telemetry import InstanceSample

TILTS = (0.0, 0.25, -0.25, 0.5)
"""Exponents, by arm."""
UNEQUAL = (1.3, 2.0, 4.0)
"""Bounds between contexts: slowest ÷ fastest instance of a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingBanditConfig:
    """Limits on trials."""

    margin: float = 0.01
    """Share of the time that all trials together may cost, compared with the algorithm alone."""

    block_steps: int = 6
    """Steps for which an arm holds; more learns more slowly and is less disturbed by the change itself."""

    settle_steps: int = 3
    """First steps of a block, which are ignored, since tables take a moment to arrive."""

    valid_s: float = 60.0
    """Seconds for which a suggestion holds; it is renewed after half of that."""


@dataclass(slots=True)
class _Trial:
    """The trials in one job."""

    bandits: dict[tuple[int, ...], ConservativeBandit] = field(default_factory=dict)
    speeds: dict[int, dict[str, float]] = field(default_factory=dict)
    """Milliseconds per microbatch by stage and instance, as last sampled."""
    context: tuple[int, ...] = ()
    arm: int = 0
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    declined: bool = False


class RoutingBandit(Policy):
    """Tries tilts of a stage's weights conservatively; is silent while the algorithm alone is best."""

    name: ClassVar[str] = "routing-bandit"
    version: ClassVar[str] = "1"

    def __init__(self, config: RoutingBanditConfig | None = None) -> None:
        self.config = config or RoutingBanditConfig()
        self._trials: dict[str, _Trial] = {}

    # --- events ---------------------------------------------------------------------------------------
    def on_instance_sample(self, sample: InstanceSample, at: float) -> None:
        if sample.service_ms > 0 and not is_data(sample.stage):
            trial = self._trials.setdefault(sample.job, _Trial())
            trial.speeds.setdefault(sample.stage, {})[sample.sid] = sample.service_ms

    def on_policy_decision(self, decision: PolicyDecision, at: float) -> None:
        if decision.module == self.name and decision.version == self.version and not decision.adopted:
            trial = self._trials.get(decision.job)
            if trial is not None and "renewed" not in decision.reason:
                trial.declined = True

    def on_job_event(self, event: JobEvent, at: float) -> None:
        if event.state in ENDED:
            self._trials.pop(event.job, None)
            return
        if event.kind in ("fault", "recovery", "instances"):
            trial = self._trials.get(event.job)
            if trial is not None:
                trial.steps, trial.seconds = 0, []  # such a step's time does not depend on the arm
        if event.kind != "step" or event.result is None:
            return
        trial = self._trials.setdefault(event.job, _Trial())
        trial.steps += 1
        if trial.steps > self.config.settle_steps:
            trial.seconds.append(event.result.step_s)
        if trial.steps >= self.config.block_steps:
            self._next(trial)

    def _next(self, trial: _Trial) -> None:
        """Ends a block: records its cost and chooses the next block's arm."""
        mean_s = sum(trial.seconds) / len(trial.seconds)
        context = tuple(_unequal(list(stage.values())) for _, stage in sorted(trial.speeds.items()))
        if context == trial.context and not (trial.declined and trial.arm):
            self._bandit(trial, context).cost(trial.arm, mean_s)
        trial.arm = 0 if trial.declined else self._bandit(trial, context).choose()
        trial.context, trial.steps, trial.seconds, trial.declined = context, 0, [], False

    def _bandit(self, trial: _Trial, context: tuple[int, ...]) -> ConservativeBandit:
        return trial.bandits.setdefault(
            context, ConservativeBandit(arms=len(TILTS), margin=self.config.margin)
        )

    # --- suggestions ----------------------------------------------------------------------------------
    def decide(self, view: JobView, now: float) -> Suggestions:
        trial = self._trials.get(view.job)
        if trial is None:
            return None
        suggestions = [self._stage(view, stage, trial.arm, now) for stage in view.stages]
        return [suggestion for suggestion in suggestions if suggestion is not None]

    def _stage(self, view: JobView, stage: int, arm: int, now: float) -> PolicySuggestion | None:
        instances = view.stage(stage, now, samples=1)
        own = view.own.get(f"stage {stage}")
        if len(instances) < 2 or (own is None and arm == 0):
            return None
        sids = [instance.sid for instance in instances]
        weights = tilted(view.mean("service_ms", sids), TILTS[arm])
        present = present_shares(view, stage, sids)
        changed = float(np.max(np.abs(shares(weights) - present))) > 0.02 / len(sids)
        stale = own is not None and arm != 0 and now - own.at >= self.config.valid_s / 2
        if not changed and not stale:
            return None
        reason = (
            f"stage {stage}: arm {arm}, weights ∝ speed^{TILTS[arm]:g} beside the algorithm"
            if arm
            else f"stage {stage}: arm 0, the algorithm alone"
        )
        return self.set_weights(
            view,
            stage,
            {sid: round(float(weight), 3) for sid, weight in zip(sids, weights, strict=True)},
            reason=reason,
            confidence=0.6,
            valid_s=self.config.valid_s,
        )


def tilted(service_ms: Floats, power: float) -> Floats:
    """Weights with mean 1, ∝ speed to this power; equal if a time is unknown."""
    if power == 0 or not np.all(np.isfinite(service_ms)) or np.any(service_ms <= 0):
        return np.ones(len(service_ms))
    weights = (np.median(service_ms) / service_ms) ** power
    return np.asarray(weights / weights.mean())


def _unequal(times_ms: list[float]) -> int:
    """The context of one stage: the band of slowest ÷ fastest."""
    if len(times_ms) < 2:
        return 0
    ratio = max(times_ms) / max(min(times_ms), 1e-9)
    return sum(ratio > bound for bound in UNEQUAL) if math.isfinite(ratio) else 0
