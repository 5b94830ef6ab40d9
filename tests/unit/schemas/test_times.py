"""Times and durations on the wire: what no calendar knows is refused at the door, not where it is used."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from bus import codec
from bus.subjects import JOB_EVENT
from schemas.access import UserCommand
from schemas.errors import BadMessage
from schemas.job import JobEvent, StepPhases
from tests.bad_messages import envelope

NEVER = (math.nan, math.inf, -math.inf, -1.0, 1e308, float(2**64))


@pytest.mark.parametrize("at", NEVER)
def test_what_is_no_time_is_refused(at: float) -> None:
    with pytest.raises(ValidationError, match="at"):
        JobEvent(job="j1", kind="state", at=at)
    with pytest.raises(BadMessage, match="envelope: sent_at"):
        codec.decode(envelope(JOB_EVENT, sent_at=at))


@pytest.mark.parametrize("took_s", NEVER)
def test_what_is_no_duration_is_refused(took_s: float) -> None:
    with pytest.raises(ValidationError, match="claims_s"):
        StepPhases(begin_s=0.0, claims_s=took_s, prepare_s=0.0, decide_s=0.0)
    with pytest.raises(ValidationError, match="expires_s"):
        UserCommand.model_validate({"op": "token", "name": "ruth", "expires_s": took_s})
