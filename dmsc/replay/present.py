"""A replay as a table and as JSON: the policy's suggestions beside those that were made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dmsc.replay.session import Key, RecordedSuggestion, Story, judged
from policies.kit.view import topic
from policies.scoring.replay import Replayed
from policies.scoring.scores import Summary, summarise
from schemas.policy import (
    AvoidInstance,
    MoveInstance,
    PolicyDecision,
    PolicyScore,
    PolicySuggestion,
    SetWeights,
)

BESIDE_S = 5.0
"""A recorded suggestion about the same thing stands beside a replayed one within so many seconds."""

COLUMNS = ("time", "step", "this policy", "the rules would say", "then", "decided then")
SCORE_COLUMNS = (
    "module",
    "version",
    "as",
    "suggestions",
    "scored",
    "missed",
    "score",
    "95 %",
    "right",
    "Brier",
    "overconfident by",
    "adopted",
)


def beside(story: Story) -> list[tuple[Replayed | None, RecordedSuggestion | None]]:
    """Both sides in order of time; what is about the same thing at the same time stands in one row."""
    left = list(story.recorded)
    rows: list[tuple[Replayed | None, RecordedSuggestion | None]] = []
    for mine in story.replayed:
        near = [other for other in left if _same(mine, other)]
        other = min(near, key=lambda one: abs(one.at - mine.at), default=None)
        if other is not None:
            left.remove(other)
        rows.append((mine, other))
    rows += [(None, other) for other in left]
    return sorted(rows, key=lambda row: min(side.at for side in row if side is not None))


def _same(mine: Replayed, other: RecordedSuggestion) -> bool:
    return (
        abs(mine.at - other.at) <= BESIDE_S
        and mine.suggestion.job == other.suggestion.job
        and topic(mine.suggestion) == topic(other.suggestion)
    )


def rows(story: Story) -> Iterable[tuple[str, ...]]:
    """For `COLUMNS`. Times in seconds from the beginning of the record."""
    for mine, other in beside(story):
        first = mine or other
        assert first is not None
        yield (
            f"{first.at - story.began:.1f}",
            str(first.suggestion.input_revision),
            "" if mine is None else suggestion_text(mine.suggestion),
            "" if mine is None else decision_text(mine.decision),
            ""
            if other is None
            else f"{other.suggestion.module} {other.suggestion.version}: "
            + suggestion_text(other.suggestion),
            "" if other is None else decision_text(other.decision),
        )


def suggestion_text(suggestion: PolicySuggestion) -> str:
    """The action in a few words; instances without their job's id."""
    action, job = suggestion.action, suggestion.job
    match action:
        case SetWeights(stage=stage, weights=weights):
            shares = ", ".join(f"{_short(sid, job)} {weights[sid]:.2f}" for sid in sorted(weights))
            text = f"stage {stage}: {shares}"
        case AvoidInstance(sid=sid):
            text = f"avoid {_short(sid, job)}"
        case MoveInstance(sid=sid, stage=stage, forecast=forecast):
            text = f"move {_short(sid, job)} to stage {stage} (saves {forecast.improvement:.0%})"
        case _:
            text = f"{action.action}: {suggestion.reason}"
    return f"{text} ({suggestion.confidence:.2f})"


def decision_text(decision: PolicyDecision | None) -> str:
    if decision is None:
        return "no answer"
    return decision.reason if decision.adopted else f"declined: {decision.reason}"


def _short(sid: str, job: str) -> str:
    return sid.removeprefix(f"{job}-")


# --- scores ------------------------------------------------------------------------------------------
def score_rows(scores: Mapping[Key, list[PolicyScore]], mine: Key | None = None) -> list[tuple[str, ...]]:
    """For `SCORE_COLUMNS`, one row per version, by module and version. `mine`: the replayed one."""
    return [
        (*key, _as(found, replayed=key == mine), *_figures(summarise(judged(found))))
        for key, found in sorted(scores.items())
    ]


def _as(scores: list[PolicyScore], *, replayed: bool) -> str:
    if replayed:
        return "replayed"
    if not scores:
        return ""
    return "shadow" if max(scores, key=lambda one: one.at).shadow else "active"


def _figures(summary: Summary) -> tuple[str, ...]:
    return (
        str(summary.suggestions),
        str(summary.scored),
        str(summary.missed),
        _number(summary.mean),
        "" if math.isnan(summary.low) else f"{summary.low:.2f} to {summary.high:.2f}",
        _percent(summary.right),
        _number(summary.brier),
        _number(summary.overconfidence, sign=True),
        _percent(summary.adopted),
    )


def _number(value: float, *, sign: bool = False) -> str:
    return "" if math.isnan(value) else f"{value:+.2f}" if sign else f"{value:.2f}"


def _percent(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0%}"


# --- JSON --------------------------------------------------------------------------------------------
def as_json(story: Story, mine: Key) -> dict[str, Any]:
    """The whole story. Nothing in it hangs on when, where or how fast it was replayed."""
    return {
        "began": story.began,
        "until": story.until,
        "messages": story.messages,
        "unreadable": story.unreadable,
        "unanswered_reads": story.unanswered_reads,
        "policy": {"module": mine[0], "version": mine[1]},
        "replayed": [_side(one) for one in story.replayed],
        "recorded": [_side(one) for one in story.recorded],
        "scores": {
            "replayed": summary_json(story.replayed_scores),
            "recorded": [
                {"module": key[0], "version": key[1], **summary_json(found)}
                for key, found in sorted(story.scores.items())
            ],
        },
        "problems": [{"where": one.where, "text": one.text} for one in story.problems],
    }


def summary_json(scores: Iterable[PolicyScore]) -> dict[str, float | int | None]:
    """A summary's figures; null where there is nothing to compute them from."""
    summary = summarise(judged(scores))
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name in Summary.__dataclass_fields__
        for value in (getattr(summary, name),)
    }


def _side(one: Replayed | RecordedSuggestion) -> dict[str, Any]:
    return {
        "at": one.at,
        "suggestion": one.suggestion.model_dump(mode="json"),
        "decision": None if one.decision is None else one.decision.model_dump(mode="json"),
    }
