"""Weights from measured service time: an instance that takes twice as long gets half the microbatches.

With R instances of a stage and mean compute times t_i per microbatch, all finish together if instance i takes
the share (1/t_i) / Σ(1/t_j). A choice by queues alone (`least-outstanding`) reacts afterwards; this policy
sets the weights beforehand (draft §5.4, computationally aware routing). If the job's routing algorithm
measures service times itself, it is silent: both together would count them twice (ADR-0016).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from bus.subject import Subject
from bus.subjects import COMPUTE
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import InstanceView, JobView
from policies.numerics.features import Floats, shares
from schemas.policy import PolicySuggestion, SetWeights
from schemas.routing import MEASURING


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceTimeWeightsConfig:
    """When measured differences are worth a change of routes."""

    min_samples: int = 3
    """Samples of each instance before the stage is evaluated. Fewer reacts sooner, also to warm-up."""

    half_life_s: float = 10.0
    """Seconds after which a sample counts half. Longer is steadier, but reacts later."""

    min_change: float = 0.05
    """Suggest only if some share changes by more than this fraction of itself."""

    valid_s: float = 60.0
    """Seconds for which a suggestion holds; it is renewed after half of that."""

    retry_s: float = 5.0
    """Seconds until a declined suggestion is made again."""


class ServiceTimeWeights(Policy):
    """Weights ∝ 1 / mean service time, per stage, with hysteresis; equal instances are left alone."""

    name: ClassVar[str] = "service-time-weights"
    version: ClassVar[str] = "1"

    def __init__(self, config: ServiceTimeWeightsConfig | None = None) -> None:
        self.config = config or ServiceTimeWeightsConfig()

    def subscribes(self) -> tuple[Subject, ...]:
        return (COMPUTE,)

    def decide(self, view: JobView, now: float) -> Suggestions:
        suggestions = [self._stage(view, stage, now) for stage in view.stages]
        return [suggestion for suggestion in suggestions if suggestion is not None]

    def _stage(self, view: JobView, stage: int, now: float) -> PolicySuggestion | None:
        config = self.config
        instances = view.stage(stage, now)
        if view.algorithms.get(stage) in MEASURING or len(instances) < 2:
            return None
        if any(instance.samples < config.min_samples for instance in instances):
            return None
        sids = [instance.sid for instance in instances]
        times = view.mean("service_ms", sids, config.half_life_s)
        best = shares(1.0 / times)
        present = self._present_shares(view, stage, sids)
        change = float(np.max(np.abs(best - present) / np.maximum(present, 1e-6)))
        if change <= config.min_change and not self._renewal(view, stage, now, present):
            return None
        own = view.own.get(f"stage {stage}")
        if own is not None and now - own.at < (config.retry_s if own.declined else self.every_s):
            return None
        weights = {sid: round(float(share) * len(sids), 3) for sid, share in zip(sids, best, strict=True)}
        return self.set_weights(
            view,
            stage,
            weights,
            reason=_reason(stage, instances, times, best, change),
            confidence=_confidence(view, sids, times),
            valid_s=config.valid_s,
        )

    def _present_shares(self, view: JobView, stage: int, sids: list[str]) -> Floats:
        """The shares of these instances by the module's last suggestion, unless declined; else equal ones."""
        own = view.own.get(f"stage {stage}")
        if own is None or own.declined or not isinstance(own.suggestion.action, SetWeights):
            return shares(np.ones(len(sids)))
        weights = own.suggestion.action.weights
        return shares(np.array([weights.get(sid, 1.0) for sid in sids]))

    def _renewal(self, view: JobView, stage: int, now: float, present: Floats) -> bool:
        """Whether to repeat unequal weights of this module: after half their validity."""
        own = view.own.get(f"stage {stage}")
        if own is None or own.declined or float(np.ptp(present)) < 1e-3:
            return False
        return now - own.at >= self.config.valid_s / 2


def _confidence(view: JobView, sids: list[str], times: Floats) -> float:
    """0.5…0.95, lower the larger the relative standard error of the means."""
    windows = view.series("service_ms", sids)
    count = np.isfinite(windows).sum(axis=1)
    error = np.nanstd(windows, axis=1) / np.sqrt(count)
    return round(float(np.clip(0.95 - np.max(error / times), 0.5, 0.95)), 3)


def _reason(stage: int, instances: list[InstanceView], times: Floats, best: Floats, change: float) -> str:
    measured = ", ".join(
        f"{instance.sid} {time:.1f} ms ({instance.samples} samples) → {share:.0%}"
        for instance, time, share in zip(instances, times, best, strict=True)
    )
    head = f"stage {stage}, mean service time per microbatch and share"
    return f"{head}: {measured}; largest change {change:.0%}"
