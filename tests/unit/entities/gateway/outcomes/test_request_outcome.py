"""What an answer says of its version, and what it does not."""

from __future__ import annotations

from typing import Any

import pytest

from entities.gateway.outcomes.outcome_reports import is_judged
from entities.gateway.outcomes.request_outcome import (
    AnswerTrace,
    RequestDraw,
    outcome_of,
    prediction_outcome,
)
from schemas.errors import BadInput, BadModelOutput, DmscError, RateLimited, Unavailable
from schemas.services.outcomes import AnsweredRequest
from tests.builders.services import served_by

SERVICE = served_by(weights={"v1": 9_500, "v2": 500}, stable="v1")
DRAW = RequestDraw(service=SERVICE, version=SERVICE.versions[1], is_drawn=True, key=9, at=10.0)


def trace(**fields: Any) -> AnswerTrace:
    usual = {"ended": "length", "over_at": 13.0, "first_at": 10.5, "last_at": 12.5, "tokens": 5}
    return AnswerTrace(**{**usual, **fields})


def test_times_are_of_the_request_and_of_each_further_token() -> None:
    found = outcome_of(DRAW, trace(score=-2.5))
    assert found == AnsweredRequest(
        version="v2", ok=True, first_token_s=0.5, per_token_s=0.5, score=-2.5, tokens=5, key=9
    )
    single = outcome_of(DRAW, trace(tokens=1, last_at=10.5))
    assert single is not None
    assert single.per_token_s is None


def test_a_client_that_leaves_before_the_first_token_has_waited() -> None:
    left = outcome_of(DRAW, trace(ended="cancelled", tokens=0, first_at=None, last_at=None, over_at=40.0))
    assert left is not None
    assert (left.ok, left.first_token_s, left.per_token_s) == (True, 30.0, None)


@pytest.mark.parametrize("failure", ["bad_model_output: not finite", "unavailable: no token for 120 s"])
def test_a_failure_is_the_versions(failure: str) -> None:
    failed = outcome_of(DRAW, trace(ended="failed", failure=failure))
    assert failed is not None
    assert (failed.ok, failed.failure, failed.first_token_s) == (False, failure.partition(":")[0], None)


@pytest.mark.parametrize(
    ("ended", "failure"),
    [("failed", "full: all instances"), ("failed", "context_length_exceeded: 9"), ("fenced", "")],
)
def test_what_is_not_its_fault_says_nothing(ended: str, failure: str) -> None:
    assert outcome_of(DRAW, trace(ended=ended, failure=failure)) is None


@pytest.mark.parametrize(
    ("error", "blames"),
    [
        (BadInput("x"), False),
        (RateLimited("x"), False),
        (BadModelOutput("x"), True),
        (Unavailable("x"), True),
    ],
)
def test_predictions(error: DmscError, blames: bool) -> None:
    answered = prediction_outcome(DRAW, 12.0)
    assert answered is not None
    assert (answered.ok, answered.first_token_s) == (True, 2.0)
    failed = prediction_outcome(DRAW, 12.0, error)
    assert (failed is not None and not failed.ok) is blames


def test_one_version_alone_is_not_judged() -> None:
    assert is_judged(SERVICE)
    assert not is_judged(served_by(weights={"v1": 10_000}, stable="v1"))
    assert is_judged(served_by(weights={"v1": 10_000}, stable="v1", shadow=("v2",)))
