"""What an answer that is over says of the version that gave it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schemas.errors import BadInput, BusUnreachable, Conflict, DmscError, NotFound, RateLimited, Refused
from schemas.services.model_service import ModelService, ServedVersion
from schemas.services.outcomes import AnsweredRequest

NOT_TO_BLAME = frozenset({"full", "context_length_exceeded"})
"""Failures that say nothing of a version's weights and code: too few instances, or too short a context."""
ASKED_WRONGLY = (BadInput, BusUnreachable, Conflict, NotFound, RateLimited, Refused)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestDraw:
    """How a request came to its version.

    Attributes:
        service: The record by which it was drawn.
        version: Who answers.
        is_drawn: The service's traffic chose it, and not whoever asked.
        key: Of the user whom it was drawn for, below `KEYS`; None: it was drawn for this request alone.
        at: When, in seconds of the loop's clock.
    """

    service: ModelService
    version: ServedVersion
    is_drawn: bool
    key: int | None
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerTrace:
    """An answer that is over; times in seconds of the loop's clock.

    Attributes:
        ended: As its session's machine says.
        failure: Why, as `CODE: TEXT`, if it failed.
        over_at: When.
        first_at: When its first token came; None: none did.
        last_at: When its last token came.
        tokens: How many there were.
        score: Mean logarithm of the probabilities of the prompt's last tokens; None: not asked for.
    """

    ended: Literal["stop", "length", "cancelled", "failed", "fenced"]
    failure: str = ""
    over_at: float
    first_at: float | None = None
    last_at: float | None = None
    tokens: int = 0
    score: float | None = None


def outcome_of(draw: RequestDraw, trace: AnswerTrace) -> AnsweredRequest | None:
    """The outcome; None: it says nothing of the version.

    A client that leaves before the first token has waited at least so long. An answer that another gateway
    goes on with is that one's.
    """
    version, key = draw.version.version, draw.key
    if trace.ended == "fenced":
        return None
    if trace.ended == "failed":
        code = trace.failure.partition(":")[0]
        if code in NOT_TO_BLAME:
            return None
        return AnsweredRequest(version=version, ok=False, failure=code[:64], tokens=trace.tokens, key=key)
    first_at = trace.over_at if trace.first_at is None else trace.first_at
    per_token_s = None
    if trace.tokens > 1 and trace.first_at is not None and trace.last_at is not None:
        per_token_s = max(0.0, trace.last_at - trace.first_at) / (trace.tokens - 1)
    return AnsweredRequest(
        version=version,
        ok=True,
        first_token_s=max(0.0, first_at - draw.at),
        per_token_s=per_token_s,
        score=trace.score,
        tokens=trace.tokens,
        key=key,
    )


def prediction_outcome(
    draw: RequestDraw, at: float, error: DmscError | None = None
) -> AnsweredRequest | None:
    """The same of `predict`: whole answers without tokens."""
    version, key = draw.version.version, draw.key
    if error is None:
        return AnsweredRequest(version=version, ok=True, first_token_s=max(0.0, at - draw.at), key=key)
    if isinstance(error, ASKED_WRONGLY):
        return None
    return AnsweredRequest(version=version, ok=False, failure=error.code[:64], key=key)
