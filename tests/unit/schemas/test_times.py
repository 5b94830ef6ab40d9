"""Times and durations on the wire: what no calendar knows ends at the door, not where it is used."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from bus.subjects import HEARTBEAT
from bus.wire import codec
from schemas.access import UserCommand
from schemas.job import JobEvent, StepPhases
from schemas.registry import Heartbeat, InstanceState
from tests.bad_messages import envelope

NEVER = (math.nan, math.inf, -math.inf, -1.0, 1e308, float(2**64))


@pytest.mark.parametrize("at", NEVER)
def test_what_is_no_time_is_refused(at: float) -> None:
    with pytest.raises(ValidationError, match="at"):
        JobEvent(job="j1", kind="state", at=at)


@pytest.mark.parametrize("at", NEVER)
def test_a_senders_broken_clock_keeps_nothing_from_being_read(at: float) -> None:
    heartbeat = {"sid": "j-s0-r0", "incarnation": "i1", "state": "active"}
    message, read = codec.decode(envelope(HEARTBEAT, sent_at=at, body=heartbeat))
    assert message == Heartbeat(sid="j-s0-r0", incarnation="i1", state=InstanceState.ACTIVE)
    assert read.sent_at == 0.0


@pytest.mark.parametrize("took_s", NEVER)
def test_what_is_no_duration_is_refused(took_s: float) -> None:
    with pytest.raises(ValidationError, match="claims_s"):
        StepPhases(begin_s=0.0, claims_s=took_s, prepare_s=0.0, decide_s=0.0)
    with pytest.raises(ValidationError, match="expires_s"):
        UserCommand.model_validate({"op": "token", "name": "ruth", "expires_s": took_s})
