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

from policies.built_in.stage_weights import (
    StageWeightsConfig,
    StageWeightsPolicy,
    present_shares,
    rounded_weights,
)
from policies.kit.view import InstanceView, JobView
from policies.numerics.features import Floats, shares
from schemas.policy import PolicySuggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceTimeWeightsConfig(StageWeightsConfig):
    """When measured differences are worth a change of routes."""

    min_change: float = 0.05
    """Suggest only if some share changes by more than this fraction of itself."""


class ServiceTimeWeights(StageWeightsPolicy):
    """Weights ∝ 1 / mean service time, per stage, with hysteresis; equal instances are left alone."""

    config: ServiceTimeWeightsConfig
    name: ClassVar[str] = "service-time-weights"
    version: ClassVar[str] = "1"

    def __init__(self, config: ServiceTimeWeightsConfig | None = None) -> None:
        self.config = config or ServiceTimeWeightsConfig()

    def decide_stage(self, view: JobView, stage: int, now: float) -> PolicySuggestion | None:
        config = self.config
        instances = self.measured(view, stage, now)
        if not instances:
            return None
        sids = [instance.sid for instance in instances]
        times = view.mean("service_ms", sids, config.half_life_s)
        best = shares(1.0 / times)
        present = present_shares(view, stage, sids)
        change = float(np.max(np.abs(best - present) / np.maximum(present, 1e-6)))
        if change <= config.min_change and not self.needs_renewal(view, stage, now, present):
            return None
        if self.is_early(view, stage, now):
            return None
        return self.set_weights(
            view,
            stage,
            rounded_weights(sids, best),
            reason=_reason(stage, instances, times, best, change),
            confidence=_confidence(view, sids, times),
            valid_s=config.valid_s,
        )


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
