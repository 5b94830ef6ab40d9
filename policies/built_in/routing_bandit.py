"""Weights beside the job's routing algorithm, tried by the time of steps (a contextual bandit).

Arm 0 leaves the algorithm alone. The others tilt a stage's weights by its instances' speed: weight ∝ speed
to the power of `TILTS`, which an algorithm that measures speed by itself takes as a correction of it: above
0 slow instances get even less, below 0 more. Step times say which is best; `conservative_bandit` sees to it
that trials together cost no more than `margin` beside the algorithm alone. Contexts are kept apart: how
unequal the instances are. One arm holds for a block of steps, the first of which count for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView, OwnSuggestion
from policies.numerics.conservative_bandit import ConservativeBandit
from policies.numerics.features import Floats, shares
from schemas.job import ENDED, JobEvent
from schemas.policy import PolicyDecision, PolicySuggestion, SetWeights
from schemas.telemetry import InstanceSample

TILTS = (0.0, 0.25, -0.25, 0.5)
"""Exponents, by arm."""
UNEQUAL = (1.3, 2.0, 4.0)
"""Slowest ÷ fastest of a stage, where one context ends and the next begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingBanditConfig:
    """How much may be tried."""

    margin: float = 0.01
    """Part of the time that trials may cost in all, beside the algorithm alone."""

    block_steps: int = 6
    """Steps that an arm holds; more is slower to learn and less disturbed by the change itself."""

    settle_steps: int = 3
    """The first steps of a block, which count for nothing: tables take a moment to arrive."""

    valid_s: float = 60.0
    """Seconds a suggestion holds; renewed at half of that."""


@dataclass(slots=True)
class _Trial:
    """One job's."""

    bandits: dict[tuple[int, ...], ConservativeBandit] = field(default_factory=dict)
    speeds: dict[int, dict[str, float]] = field(default_factory=dict)
    """Milliseconds per microbatch by stage and instance, as last told."""
    context: tuple[int, ...] = ()
    arm: int = 0
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    declined: bool = False


class RoutingBandit(Policy):
    """Tilts of a stage's weights, tried conservatively; says nothing while the algorithm alone is best."""

    name: ClassVar[str] = "routing-bandit"
    version: ClassVar[str] = "1"

    def __init__(self, config: RoutingBanditConfig | None = None) -> None:
        self.config = config or RoutingBanditConfig()
        self._trials: dict[str, _Trial] = {}

    # --- what is seen ---------------------------------------------------------------------------------
    def on_instance_sample(self, sample: InstanceSample, at: float) -> None:
        if sample.service_ms > 0 and sample.stage >= 0:
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
                trial.steps, trial.seconds = 0, []  # the time of such a step says nothing of the arm
        if event.kind != "step" or event.result is None:
            return
        trial = self._trials.setdefault(event.job, _Trial())
        trial.steps += 1
        if trial.steps > self.config.settle_steps:
            trial.seconds.append(event.result.step_s)
        if trial.steps >= self.config.block_steps:
            self._next(trial)

    def _next(self, trial: _Trial) -> None:
        """The block is over: what it cost, and the next one's arm."""
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

    # --- what is suggested ----------------------------------------------------------------------------
    def decide(self, view: JobView, now: float) -> Suggestions:
        trial = self._trials.get(view.job)
        if trial is None:
            return None
        found = [self._stage(view, stage, trial.arm, now) for stage in view.stages]
        return [suggestion for suggestion in found if suggestion is not None]

    def _stage(self, view: JobView, stage: int, arm: int, now: float) -> PolicySuggestion | None:
        instances = view.stage(stage, now, samples=1)
        own = view.own.get(f"stage {stage}")
        if len(instances) < 2 or (own is None and arm == 0):
            return None
        sids = [one.sid for one in instances]
        weights = tilted(view.mean("service_ms", sids), TILTS[arm])
        held = np.array([_held(own).get(sid, 1.0) for sid in sids])
        changed = float(np.max(np.abs(shares(weights) - shares(held)))) > 0.02 / len(sids)
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
    """Weights with mean 1, ∝ speed to this power; equal where a time is not known."""
    if power == 0 or not np.all(np.isfinite(service_ms)) or np.any(service_ms <= 0):
        return np.ones(len(service_ms))
    weights = (np.median(service_ms) / service_ms) ** power
    return np.asarray(weights / weights.mean())


def _held(own: OwnSuggestion | None) -> dict[str, float]:
    """The weights that our last suggestion, if it was not declined, gives; who is not named has 1."""
    if own is None or own.declined or not isinstance(own.suggestion.action, SetWeights):
        return {}
    return own.suggestion.action.weights


def _unequal(times_ms: list[float]) -> int:
    """The context of one stage: in which band slowest ÷ fastest is."""
    if len(times_ms) < 2:
        return 0
    ratio = max(times_ms) / max(min(times_ms), 1e-9)
    return sum(ratio > bound for bound in UNEQUAL) if math.isfinite(ratio) else 0
