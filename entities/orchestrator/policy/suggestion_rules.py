"""Whether a suggestion makes sense for its job in the job's present state. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from entities.orchestrator.transaction.reduction_layout import EVEN, ReductionLayout
from entities.queue.growth import UseLimits, forbidden_use
from schemas.actions import (
    LEAST_RATE_PER_S,
    Action,
    AvoidInstance,
    ExpectFailures,
    Migrate,
    MoveInstance,
    Recut,
    RollBack,
    Scale,
    ServiceAction,
    SetAlgorithm,
    SetQueueOrder,
    SetRate,
    SetReduction,
    SetTraffic,
    SetWeights,
    SetWindow,
    UseBackup,
    forecast_of,
    scope_of,
)
from schemas.automation import Automation
from schemas.changes import Forecast, JobObjective
from schemas.policy import PolicySuggestion
from schemas.routing import ALGORITHMS
from schemas.services.model_service import WHOLE, ModelService


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """What the orchestrator knows of a running job: active SIDs and weights by stage, policy revision, step.

    A SID that `weights` does not name has weight 1 (as in `StagePolicy`). `user` submitted the job.
    `automation` is the lower one of the job's mode and the mesh's; `replica_range`: least and most replicas
    of each stage, None: not known; `used`: so far, in the objectives' units, as far as known.
    """

    active: Mapping[int, Collection[str]]
    weights: Mapping[int, Mapping[str, float]]
    revision: int
    step: int | None = None
    user: str = ""
    windows: Mapping[int, int] = field(default_factory=dict)
    admitted_per_s: float = 0.0
    """The admission rate; 0: no limit."""
    microbatches: int | None = None
    """Of a step; None: not known."""
    senders: int = 1
    """Who sends to the first stage, and shares the admission rate."""
    exact: bool = True
    """Whether its sums are of integers, so that their order changes no bit."""
    layouts: Mapping[int, ReductionLayout] = field(default_factory=dict)
    """How stages' sums are to be reduced; of a stage that is missing, in equal parts."""
    algorithm: str = ""
    replicas: int = 1
    replica_range: tuple[int, int] | None = None
    waiting: Collection[str] | None = None
    """Jobs that wait for slots; None: not known."""
    automation: Automation = Automation.ACT
    objective: JobObjective = JobObjective.TIME
    budget: Mapping[JobObjective, float] = field(default_factory=dict)
    used: Mapping[JobObjective, float] = field(default_factory=dict)
    service: ModelService | None = None
    """Of a job that serves: the record of its service."""
    serves: str = ""
    """… and the version that it is."""


def weights_in_force(facts: JobFacts, stage: int) -> dict[str, float]:
    """The stage's present weights, for all active instances."""
    weights = facts.weights.get(stage, {})
    return {sid: weights.get(sid, 1.0) for sid in sorted(facts.active.get(stage, ()))}


def shares_of(weights: Mapping[str, float]) -> dict[str, float]:
    """The part of a stage's work that each instance gets by these weights."""
    total = sum(weights.values())
    return {sid: weight / total if total > 0 else 0.0 for sid, weight in weights.items()}


def nonsense_in(suggestion: PolicySuggestion, facts: JobFacts | None) -> str:
    """Why the suggestion makes no sense; empty if it does."""
    if not math.isfinite(suggestion.valid_s):
        return f"valid for {suggestion.valid_s} s"
    if suggestion.scope not in ("", scope_of(suggestion.action)):
        return f"its scope is {suggestion.scope}, its action concerns {scope_of(suggestion.action)}"
    forecast = forecast_of(suggestion.action)
    if forecast is not None and (why := _against_itself(forecast)):
        return why
    if facts is None:
        return ""
    if isinstance(suggestion.action, ServiceAction):
        return _traffic_of_nothing(suggestion.action, facts)
    match suggestion.action:
        case AvoidInstance(sid=sid):
            stage = next((stage for stage, sids in facts.active.items() if sid in sids), None)
            if stage is None:
                return f"unknown instance {sid}"
            weights = weights_in_force(facts, stage)
            if not any(weight > 0 for other, weight in weights.items() if other != sid):
                return f"without {sid} nobody would be left to do stage {stage}"
        case UseBackup(sid=sid, backup=backup):
            stage = next((stage for stage, sids in facts.active.items() if sid in sids), None)
            if stage is None:
                return f"unknown instance {sid}"
            if backup == sid:
                return f"{sid} is no backup of itself"
            if backup not in facts.active[stage]:
                return f"unknown instance {backup} in stage {stage}"
        case ExpectFailures(between_s=between_s):
            if not (math.isfinite(between_s) and between_s > 0):
                return f"a failure every {between_s} s"
        case Migrate(sid=sid):
            if not any(sid in sids for sids in facts.active.values()):
                return f"unknown instance {sid}"
        case Scale(replicas=replicas):
            least, most = facts.replica_range or (1, replicas)
            if least == most != replicas:
                return "the job has no range of replicas: parallel.replicas: {min, want, max} gives one"
            if not least <= replicas <= most:
                return f"{replicas} replicas are outside of the job's range, {least} to {most}"
        case Recut(cuts=cuts):
            if cuts is not None and len(cuts) != len(facts.active):
                return f"a plan of {len(cuts)} stages for a job that runs in {len(facts.active)}"
        case SetWindow(stage=stage):
            if stage not in facts.active:
                return f"unknown stage {stage}"
        case SetRate(per_s=per_s, forecast=promised):
            least_per_s = LEAST_RATE_PER_S * facts.senders
            if per_s < least_per_s:
                return f"{per_s:g} a second: for {facts.senders} senders give {least_per_s:g} at least"
            least_s = (facts.microbatches or 0) / per_s
            if promised.step_after_s < 0.95 * least_s:  # the first of a step may come early
                return (
                    f"a step of {facts.microbatches} microbatches takes at least {least_s:.3f} s at "
                    f"{per_s:g} a second, and not {promised.step_after_s:.3f} s as its forecast says"
                )
        case SetReduction(stage=stage, parts=parts, order=order):
            return _layout_of_nothing(facts, stage, parts, order)
        case SetAlgorithm(algorithm=algorithm):
            if algorithm not in ALGORITHMS:
                return f"algorithm {algorithm}: give one of {', '.join(ALGORITHMS)}"
        case SetQueueOrder(jobs=jobs):
            if len(set(jobs)) < len(jobs):
                return "the order names a job twice"
            if strange := [job for job in jobs if facts.waiting is not None and job not in facts.waiting]:
                return f"job {strange[0]} does not wait for slots"
        case MoveInstance(sid=sid, stage=stage):
            if stage not in facts.active:
                return f"unknown stage {stage}"
            here = next((number for number, sids in facts.active.items() if sid in sids), None)
            if here is None:
                return f"unknown instance {sid}"
            if here == stage:
                return f"{sid} is in stage {stage} already"
            if len(facts.active[here]) < 2:
                return f"without {sid} nobody would be left to do stage {here}"
        case SetWeights(stage=stage, weights=weights):
            active = facts.active.get(stage)
            if not active:
                return f"unknown stage {stage}"
            strange = sorted(set(weights) - set(active))
            if strange:
                return f"unknown instance {', '.join(strange[:3])} in stage {stage}"
            bad = sorted(sid for sid, weight in weights.items() if not math.isfinite(weight) or weight < 0)
            if bad:
                return f"weight {weights[bad[0]]} of {bad[0]} is not a finite number ≥ 0"
            if not 0 < sum(weights.values()) < math.inf:
                return f"the weights of stage {stage} sum to {sum(weights.values()):g}"
    return ""


def _traffic_of_nothing(action: ServiceAction, facts: JobFacts) -> str:
    """Why a service's traffic can't be changed so; empty if it can."""
    service = facts.service
    if service is None:
        return "the job serves nothing"
    if action.service != service.service:
        return f"the job is a version of {service.service}, not of {action.service}"
    if isinstance(action, RollBack):
        if action.version != facts.serves:
            return f"the job is version {facts.serves}, not {action.version}"
        if action.version == service.stable:
            return f"{action.version} is the stable version, which others go back to"
        return ""
    if strange := sorted(name for name in action.weights if service.version(name) is None):
        return f"service {service.service} has no version {strange[0]}"
    if min(action.weights.values(), default=0) < 0 or sum(action.weights.values()) != WHOLE:
        return f"weights are at least 0 and {WHOLE:,} in all, not {dict(action.weights)}"
    return ""


def _layout_of_nothing(
    facts: JobFacts, stage: int, parts: Mapping[str, float], order: Collection[str]
) -> str:
    """Why a stage's sums can't be reduced so; empty if they can."""
    active = facts.active.get(stage)
    if not active:
        return f"unknown stage {stage}"
    if len(active) < 2:
        return f"stage {stage} has one replica: nothing is reduced"
    if not facts.exact:
        return f"stage {stage} sums floats (training.exact_accumulation: false): another order has other bits"
    if not parts and not order:
        return f"it says neither parts nor order of the reduction of stage {stage}"
    if strange := sorted({*parts, *order} - set(active)):
        return f"unknown instance {', '.join(strange[:3])} in stage {stage}"
    if len(set(order)) < len(order):
        return f"the order of the reduction of stage {stage} names an instance twice"
    if bad := sorted(sid for sid, part in parts.items() if not math.isfinite(part) or part < 0):
        return f"part {parts[bad[0]]} of {bad[0]} is not a finite number ≥ 0"
    if not any(parts.get(sid, 1.0) > 0 for sid in active):
        return f"nobody would add up anything of the sum of stage {stage}"
    return ""


def changes_nothing(action: Action, facts: JobFacts) -> bool:
    """Whether the knob of this action is set so already."""
    match action:
        case Scale(replicas=replicas):
            return facts.replicas == replicas
        case SetWindow(stage=stage, in_flight=in_flight):
            return facts.windows.get(stage) == in_flight
        case SetRate(per_s=per_s):
            return facts.admitted_per_s == per_s
        case SetReduction(stage=stage, parts=parts, order=order):
            return facts.layouts.get(stage, EVEN) == ReductionLayout(parts=parts, order=order)
        case SetAlgorithm(algorithm=algorithm):
            return facts.algorithm == algorithm
        case RollBack(version=version) if (service := facts.service) is not None:
            return not service.weights.get(version) and version not in service.shadow
        case SetTraffic(weights=weights) if (service := facts.service) is not None:
            return {name: weight for name, weight in weights.items() if weight} == service.weights
    return False


def lag_of(suggestion: PolicySuggestion, facts: JobFacts | None) -> int:
    """Steps between the job's present step and the step from which the suggestion was derived."""
    return 0 if facts is None or facts.step is None else facts.step - suggestion.input_revision


def _against_itself(forecast: Forecast) -> str:
    """Why a module's own objective forbids what it suggests; empty if it does not."""
    objective = forecast.objective
    if objective is JobObjective.TIME:
        if forecast.saving <= 0:
            return (
                "its own objective time forbids it: by its forecast a step takes "
                f"{forecast.step_after_s:.3f} s instead of {forecast.step_before_s:.3f} s"
            )
        return ""
    use = forecast.uses.get(objective)
    if use is None:
        return (
            f"its objective is {objective}, but its forecast lacks uses.{objective}: what a step uses of it"
        )
    if use.after >= use.before:
        return (
            f"its own objective {objective} forbids it: by its forecast a step uses {use.after:g} "
            f"{objective.unit} instead of {use.before:g}"
        )
    return ""


def forbidden_by_job(suggestion: PolicySuggestion, facts: JobFacts) -> str:
    """Why the job's objective or budget forbids this; empty if they don't."""
    forecast = forecast_of(suggestion.action)
    if forecast is None:
        return ""
    grows = isinstance(suggestion.action, Scale) and suggestion.action.replicas > facts.replicas
    limits = UseLimits(objective=facts.objective, budget=facts.budget, used=facts.used)
    return forbidden_use(forecast, limits, grows=grows)
