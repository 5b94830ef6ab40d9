"""Whether a suggestion makes sense for its job in the job's present state. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from schemas.policy import (
    AvoidInstance,
    ExpectFailures,
    MoveInstance,
    PolicySuggestion,
    SetWeights,
    scope_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """What the orchestrator knows of a running job: active SIDs and weights by stage, policy revision, step.

    A SID that `weights` does not name has weight 1 (as in `StagePolicy`). `user` submitted the job.
    """

    active: Mapping[int, Collection[str]]
    weights: Mapping[int, Mapping[str, float]]
    revision: int
    step: int | None = None
    user: str = ""


def weights_in_force(facts: JobFacts, stage: int) -> dict[str, float]:
    """The stage's present weights, for all active instances."""
    weights = facts.weights.get(stage, {})
    return {sid: weights.get(sid, 1.0) for sid in sorted(facts.active.get(stage, ()))}


def nonsense_in(suggestion: PolicySuggestion, facts: JobFacts | None) -> str:
    """Why the suggestion makes no sense; empty if it does."""
    if not math.isfinite(suggestion.valid_s):
        return f"valid for {suggestion.valid_s} s"
    if suggestion.scope not in ("", scope_of(suggestion.action)):
        return f"its scope is {suggestion.scope}, its action concerns {scope_of(suggestion.action)}"
    if facts is None:
        return ""
    match suggestion.action:
        case AvoidInstance(sid=sid):
            stage = next((stage for stage, sids in facts.active.items() if sid in sids), None)
            if stage is None:
                return f"unknown instance {sid}"
            weights = weights_in_force(facts, stage)
            if not any(weight > 0 for other, weight in weights.items() if other != sid):
                return f"without {sid} nobody would be left to do stage {stage}"
        case ExpectFailures(between_s=between_s):
            if not (math.isfinite(between_s) and between_s > 0):
                return f"a failure every {between_s} s"
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


def lag_of(suggestion: PolicySuggestion, facts: JobFacts | None) -> int:
    """Steps between the job's present step and the step from which the suggestion was derived."""
    return 0 if facts is None or facts.step is None else facts.step - suggestion.input_revision
