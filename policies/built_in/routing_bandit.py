"""Weights in addition to the job's routing algorithm, tried out by step times (a contextual bandit).

Arm 0 leaves the algorithm alone. The others tilt a stage's weights by its instances' speed: weight ∝ speed to
the power of `TILTS`. An algorithm that measures speed itself takes that as a correction: above 0 slow
instances get even less, below 0 more. Step times decide which is best; `conservative_bandit` keeps the cost
of all trials below `margin` of the time of the algorithm alone. Contexts, the inequality of the instances,
are kept apart. One arm holds for a block of steps, of which the first are ignored. What jobs have shown of an
arm, relative to the algorithm alone, is the prior of later jobs in the same context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from policies.built_in.stage_weights import present_shares
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.numerics.conservative_bandit import ArmPrior, BanditState, ConservativeBandit
from policies.numerics.features import Floats, shares
from schemas.job import ENDED, JobEvent
from schemas.policy import PolicyDecision, PolicySuggestion
from schemas.task_graph import is_data
from schemas.telemetry import InstanceSample

TILTS = (0.0, 0.25, -0.25, 0.5)
"""Exponents, by arm."""
FADES = 0.8
"""Weight of what earlier jobs have shown of an arm, at each job that ends."""
MOST_WEIGHT = 12.0
MOST_JOBS, MOST_CONTEXTS = 64, 256
"""Most running jobs and contexts that are kept on the bus: the last ones."""
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


class TrialState(TypedDict):
    """The trials of one job as plain data; bandits by context."""

    context: str
    arm: int
    steps: int
    seconds: list[float]
    declined: bool
    bandits: dict[str, BanditState]


class RoutingBanditState(TypedDict):
    """What it learnt: running jobs, and by context each arm's cost relative to the algorithm alone."""

    jobs: dict[str, TrialState]
    priors: dict[str, list[tuple[float, float]]]


_STATE = TypeAdapter(RoutingBanditState)


class RoutingBandit(Policy):
    """Tries tilts of a stage's weights conservatively; is silent while the algorithm alone is best."""

    name: ClassVar[str] = "routing-bandit"
    version: ClassVar[str] = "1"
    state_version: ClassVar[int] = 1

    def __init__(self, config: RoutingBanditConfig | None = None) -> None:
        self.config = config or RoutingBanditConfig()
        self._trials: dict[str, _Trial] = {}
        self._priors: dict[tuple[int, ...], list[ArmPrior]] = {}

    # --- what it has learnt ---------------------------------------------------------------------------
    def learnt_state(self) -> RoutingBanditState:
        return RoutingBanditState(
            jobs={
                job: TrialState(
                    context=_name(trial.context),
                    arm=trial.arm,
                    steps=trial.steps,
                    seconds=list(trial.seconds),
                    declined=trial.declined,
                    bandits={_name(context): bandit.as_data() for context, bandit in trial.bandits.items()},
                )
                for job, trial in list(self._trials.items())[-MOST_JOBS:]
            },
            priors={
                _name(context): [(prior.ratio, prior.weight) for prior in priors]
                for context, priors in list(self._priors.items())[-MOST_CONTEXTS:]
            },
        )

    def restore(self, state: Any) -> None:
        known = _STATE.validate_python(state)
        if any(len(priors) != len(TILTS) for priors in known["priors"].values()):
            raise ValueError(f"priors of another number of arms than {len(TILTS)}")
        priors = {_context(name): [ArmPrior(*one) for one in arms] for name, arms in known["priors"].items()}
        trials: dict[str, _Trial] = {}
        for job, kept in known["jobs"].items():
            if not 0 <= kept["arm"] < len(TILTS):
                raise ValueError(f"there is no arm {kept['arm']}")
            trial = trials[job] = _Trial(
                speeds=self._trials[job].speeds if job in self._trials else {},
                context=_context(kept["context"]),
                arm=kept["arm"],
                steps=kept["steps"],
                seconds=list(kept["seconds"]),
                declined=kept["declined"],
            )
            for name, bandit in kept["bandits"].items():
                context = _context(name)
                trial.bandits[context] = self._new_bandit(priors.get(context, ()))
                trial.bandits[context].restore(bandit)
        self._trials, self._priors = trials, priors

    def _remember(self, trial: _Trial) -> None:
        """Adds what an ended job has shown to the priors; older jobs count less."""
        for context, bandit in trial.bandits.items():
            before = self._priors.pop(context, [ArmPrior(1.0, 0.0)] * len(TILTS))
            self._priors[context] = [
                _joined(old, new) for old, new in zip(before, bandit.ratios(), strict=True)
            ]
        while len(self._priors) > MOST_CONTEXTS:
            del self._priors[next(iter(self._priors))]

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
            ended = self._trials.pop(event.job, None)
            if ended is not None:
                self._remember(ended)
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
        if context not in trial.bandits:
            trial.bandits[context] = self._new_bandit(self._priors.get(context, ()))
        return trial.bandits[context]

    def _new_bandit(self, prior: Sequence[ArmPrior]) -> ConservativeBandit:
        return ConservativeBandit(arms=len(TILTS), margin=self.config.margin, prior=tuple(prior))

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


def _joined(old: ArmPrior, new: ArmPrior) -> ArmPrior:
    """Both together; the old one has faded, and no prior counts more than `MOST_WEIGHT` observations."""
    faded = FADES * old.weight
    weight = faded + new.weight
    if weight <= 0:
        return ArmPrior(1.0, 0.0)
    return ArmPrior((faded * old.ratio + new.weight * new.ratio) / weight, min(weight, MOST_WEIGHT))


def _name(context: tuple[int, ...]) -> str:
    """A context as one text: `0,2`."""
    return ",".join(map(str, context))


def _context(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(",")) if name else ()


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
