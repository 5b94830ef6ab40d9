"""Shows a replay as a table or as JSON: the policy's suggestions beside the recorded ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dmsc.replay.session import Key, RecordedSuggestion, Story, judged
from policies.kit.view import topic
from policies.scoring.replay import Replayed
from policies.scoring.scores import Summary, summarise
from schemas.actions import UseBackup
from schemas.fault_choices import FaultAnswer
from schemas.policy import (
    AvoidInstance,
    MoveInstance,
    PolicyDecision,
    PolicyScore,
    PolicySuggestion,
    SetWeights,
)

COLUMNS = ("time", "step", "this policy", "the rules would say", "then", "decided then")
FAULT_COLUMNS = ("fault at hand", "this policy", "then")
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

ACTION_COLUMNS = ("module", "version", "action", "objective", *SCORE_COLUMNS[3:])


def beside(story: Story, within_s: float = 5.0) -> list[tuple[Replayed | None, RecordedSuggestion | None]]:
    """Pair replayed and recorded suggestions on the same topic at about the same time, in order of time.

    "At about the same time" is within `within_s` seconds.
    """
    unpaired = list(story.recorded)
    rows: list[tuple[Replayed | None, RecordedSuggestion | None]] = []
    for replayed in story.replayed:
        near = [recorded for recorded in unpaired if _same(replayed, recorded, within_s)]
        nearest = min(near, key=lambda recorded: abs(recorded.at - replayed.at), default=None)
        if nearest is not None:
            unpaired.remove(nearest)
        rows.append((replayed, nearest))
    rows += [(None, recorded) for recorded in unpaired]
    return sorted(rows, key=lambda row: min(side.at for side in row if side is not None))


def _same(replayed: Replayed, recorded: RecordedSuggestion, within_s: float) -> bool:
    return (
        abs(replayed.at - recorded.at) <= within_s
        and replayed.suggestion.job == recorded.suggestion.job
        and topic(replayed.suggestion) == topic(recorded.suggestion)
    )


def rows(story: Story) -> Iterable[tuple[str, ...]]:
    """The rows for `COLUMNS`. Times are seconds from the begin of the record."""
    for replayed, recorded in beside(story):
        first = replayed or recorded
        assert first is not None
        yield (
            f"{first.at - story.began:.1f}",
            str(first.suggestion.input_revision),
            "" if replayed is None else suggestion_text(replayed.suggestion),
            "" if replayed is None else decision_text(replayed.decision),
            ""
            if recorded is None
            else f"{recorded.suggestion.module} {recorded.suggestion.version}: "
            + suggestion_text(recorded.suggestion),
            "" if recorded is None else decision_text(recorded.decision),
        )


def suggestion_text(suggestion: PolicySuggestion) -> str:
    """Describe a suggestion's action in a few words. Instances are named without their job's id."""
    action, job = suggestion.action, suggestion.job
    match action:
        case SetWeights(stage=stage, weights=weights):
            shares = ", ".join(f"{_short(sid, job)} {weights[sid]:.2f}" for sid in sorted(weights))
            text = f"stage {stage}: {shares}"
        case AvoidInstance(sid=sid):
            text = f"avoid {_short(sid, job)}"
        case UseBackup(sid=sid, backup=backup):
            text = f"{_short(backup, job)} in the place of {_short(sid, job)}"
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


def fault_rows(story: Story) -> list[tuple[str, ...]]:
    """The rows for `FAULT_COLUMNS`: this policy's answers about faults beside those of that time."""
    replayed = {answer.question: answer for answer in story.fault_answers}
    recorded: dict[str, list[FaultAnswer]] = {question: [] for question in replayed}
    for answer in story.recorded_fault_answers:
        recorded.setdefault(answer.question, []).append(answer)
    return [
        (
            question,
            _answer_text(replayed[question]) if question in replayed else "",
            "; ".join(f"{answer.module} {answer.version}: {_answer_text(answer)}" for answer in answers),
        )
        for question, answers in recorded.items()
    ]


def _answer_text(answer: FaultAnswer) -> str:
    way = "" if answer.action is None else answer.action.action
    return f"{way}: {answer.reason} ({answer.confidence:.2f})"


# --- scores ------------------------------------------------------------------------------------------
def by_action(
    scores: Mapping[Key, list[PolicyScore]],
) -> dict[tuple[str, str, str, str], list[PolicyScore]]:
    """Scores by module, version, kind of action and objective."""
    parts: dict[tuple[str, str, str, str], list[PolicyScore]] = {}
    for key, version_scores in sorted(scores.items()):
        for score in version_scores:
            parts.setdefault((*key, score.action, score.objective.value), []).append(score)
    return dict(sorted(parts.items()))


def action_rows(scores: Mapping[Key, list[PolicyScore]]) -> list[tuple[str, ...]]:
    """The rows for `ACTION_COLUMNS`, one per version, kind of action and objective."""
    return [
        (*key, *_figures(summarise(judged(action_scores))))
        for key, action_scores in by_action(scores).items()
    ]


def score_rows(scores: Mapping[Key, list[PolicyScore]], own: Key | None = None) -> list[tuple[str, ...]]:
    """The rows for `SCORE_COLUMNS`, one per version, sorted. `own` is the key of the replayed version."""
    return [
        (
            *key,
            _as(version_scores, replayed=key == own),
            *_figures(summarise(judged(version_scores))),
        )
        for key, version_scores in sorted(scores.items())
    ]


def _as(scores: list[PolicyScore], *, replayed: bool) -> str:
    if replayed:
        return "replayed"
    if not scores:
        return ""
    return "shadow" if max(scores, key=lambda score: score.at).shadow else "active"


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
def as_json(story: Story, own: Key) -> dict[str, Any]:
    """The whole story. It does not depend on when, where or how fast the record was replayed."""
    return {
        "began": story.began,
        "until": story.until,
        "messages": story.messages,
        "unreadable": story.unreadable,
        "unanswered_reads": story.unanswered_reads,
        "policy": {"module": own[0], "version": own[1]},
        "replayed": [_side(suggestion) for suggestion in story.replayed],
        "recorded": [_side(suggestion) for suggestion in story.recorded],
        "fault_answers": {
            "replayed": [answer.model_dump(mode="json") for answer in story.fault_answers],
            "recorded": [answer.model_dump(mode="json") for answer in story.recorded_fault_answers],
        },
        "scores": {
            "replayed": summary_json(story.replayed_scores),
            "recorded": [
                {"module": key[0], "version": key[1], **summary_json(version_scores)}
                for key, version_scores in sorted(story.scores.items())
            ],
        },
        "problems": [{"where": problem.where, "text": problem.text} for problem in story.problems],
    }


def summary_json(scores: Iterable[PolicyScore]) -> dict[str, float | int | None]:
    """A summary's figures; null if there is nothing to compute them from."""
    summary = summarise(judged(scores))
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name in Summary.__dataclass_fields__
        for value in (getattr(summary, name),)
    }


def _side(made: Replayed | RecordedSuggestion) -> dict[str, Any]:
    return {
        "at": made.at,
        "suggestion": made.suggestion.model_dump(mode="json"),
        "decision": None if made.decision is None else made.decision.model_dump(mode="json"),
    }
