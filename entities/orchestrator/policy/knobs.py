"""Knobs of a job with one writer each (ADR-0092): who holds which one, and who may take it over. Pure.

Whoever's suggestion was adopted holds its knob until the validity ends, or until somebody of higher rank sets
it: a person outranks modules, these outrank the orchestrator's own loop; among modules precedence is compared
first, then confidence. What a person has set stays until a person releases it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.actions import SetWeights, UseBackup, knob_of, value_of
from schemas.automation import OPERATOR, OWN_LOOP, Knob
from schemas.policy import PolicySuggestion

JobKnob = tuple[str, str]
"""(job, knob's name)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveSuggestion:
    """An adopted suggestion, in force from `at` until `until`, with the weights that it sets, if any."""

    module: str
    version: str
    confidence: float
    at: float
    until: float
    weights: Mapping[str, float] = field(default_factory=dict)
    value: str = ""
    reason: str = ""
    backup: str = ""
    """Of an instance that is avoided: who gets its share; empty: the others of its stage."""


def held_by(
    suggestion: PolicySuggestion, now: float, until: float, weights: Mapping[str, float] | None = None
) -> ActiveSuggestion:
    """The suggestion in force."""
    return ActiveSuggestion(
        module=suggestion.module,
        version=suggestion.version,
        confidence=suggestion.confidence,
        at=now,
        until=until,
        weights=weights or {},
        value=value_of(suggestion.action),
        reason=suggestion.reason,
        backup=suggestion.action.backup if isinstance(suggestion.action, UseBackup) else "",
    )


def set_by_operator(value: str, user: str, now: float) -> ActiveSuggestion:
    """What a person has set: it holds until a person releases it."""
    return ActiveSuggestion(
        module=OPERATOR,
        version="",
        confidence=1.0,
        at=now,
        until=math.inf,
        value=value,
        reason=f"set by {user}",
    )


def rank(module: str, confidence: float, precedence: Mapping[str, int]) -> tuple[int, int, float]:
    """Higher ranks prevail."""
    authority = {OPERATOR: 2, OWN_LOOP: 0}.get(module, 1)
    return authority, precedence.get(module, 0), confidence


def taken(
    suggestion: PolicySuggestion,
    holder: ActiveSuggestion | None,
    now: float,
    precedence: Mapping[str, int],
) -> str:
    """Why another one's knob is not set by this suggestion; empty if it may be."""
    if holder is None or holder.until <= now or holder.module == suggestion.module:
        return ""
    own = rank(suggestion.module, suggestion.confidence, precedence)
    theirs = rank(holder.module, holder.confidence, precedence)
    if own > theirs:
        return ""
    knob = knob_of(suggestion.action)
    if holder.module == OPERATOR:
        return f"{knob}: {holder.reason}, until a person releases it"
    rest = f"{knob}: held for another {holder.until - now:.1f} s"
    figures = f"confidence {holder.confidence:.2f} against {suggestion.confidence:.2f}"
    return f"{rest}: {holder.module} prevails with {figures}"


def as_weights(suggestion: PolicySuggestion) -> dict[str, float]:
    """The weights of one suggestion, scaled to a mean of 1.

    An instance that the module does not know has weight 1, and so counts as an average one.
    """
    if isinstance(suggestion.action, SetWeights):
        weights = suggestion.action.weights
        mean = sum(weights.values()) / len(weights)
        return {sid: round(weight / mean, 4) for sid, weight in weights.items()}
    return {}


def in_words(name: str, holder: ActiveSuggestion, now: float) -> Knob:
    """A knob as people see it."""
    return Knob(
        name=name,
        value=holder.value,
        holder=holder.module,
        confidence=holder.confidence,
        reason=holder.reason,
        held_s=round(max(0.0, now - holder.at), 1),
        left_s=None if math.isinf(holder.until) else round(max(0.0, holder.until - now), 1),
    )
