"""What the policies have in common that suggest weights of a stage's instances; no policy by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bus.subject_row import Subject
from bus.subjects import COMPUTE
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import InstanceView, JobView
from policies.numerics.features import Floats, shares
from schemas.policy import PolicySuggestion
from schemas.routing import MEASURING


@dataclass(frozen=True, kw_only=True, slots=True)
class StageWeightsConfig:
    """The settings that these policies have in common."""

    min_samples: int = 3
    """Samples of each instance before the stage is evaluated. Fewer reacts sooner, also to warm-up."""

    half_life_s: float = 10.0
    """Seconds after which a sample of service time counts half. Longer is steadier, but reacts later."""

    valid_s: float = 60.0
    """Seconds for which a suggestion holds; it is renewed after half of that."""

    retry_s: float = 5.0
    """Seconds until a declined suggestion is made again."""


class StageWeightsPolicy(Policy):
    """Suggests weights for one stage after another; silent if the job's algorithm measures times itself."""

    config: StageWeightsConfig

    def subscribes(self) -> tuple[Subject, ...]:
        return (COMPUTE,)

    def decide(self, view: JobView, now: float) -> Suggestions:
        suggestions = [self.decide_stage(view, stage, now) for stage in view.stages]
        return [suggestion for suggestion in suggestions if suggestion is not None]

    def decide_stage(self, view: JobView, stage: int, now: float) -> PolicySuggestion | None:
        """The suggestion for one stage, if any."""
        raise NotImplementedError

    def measured(self, view: JobView, stage: int, now: float) -> list[InstanceView]:
        """The instances of a stage; none if there is nothing to choose, or one was not measured enough."""
        instances = view.stage(stage, now)
        if view.algorithms.get(stage) in MEASURING or len(instances) < 2:
            return []
        if any(instance.samples < self.config.min_samples for instance in instances):
            return []
        return instances

    def is_early(self, view: JobView, stage: int, now: float) -> bool:
        """Whether the last suggestion for this stage is too young for another one."""
        own = view.own.get(f"stage {stage}")
        if own is None:
            return False
        return now - own.at < (self.config.retry_s if own.declined else self.every_s)

    def needs_renewal(self, view: JobView, stage: int, now: float, present: Floats) -> bool:
        """Whether to repeat unequal weights of this module: after half their validity."""
        own = view.own.get(f"stage {stage}")
        if own is None or own.declined or float(np.ptp(present)) < 1e-3:
            return False
        return now - own.at >= self.config.valid_s / 2


def present_shares(view: JobView, stage: int, sids: list[str]) -> Floats:
    """The shares of these instances by the module's last suggestion, unless declined; else equal ones."""
    own = view.own.get(f"stage {stage}")
    weights = {} if own is None else own.weights
    return shares(np.array([weights.get(sid, 1.0) for sid in sids]))


def rounded_weights(sids: list[str], stage_shares: Floats) -> dict[str, float]:
    """The weights, with mean 1, that give these shares."""
    return {sid: round(float(share) * len(sids), 3) for sid, share in zip(sids, stage_shares, strict=True)}
