"""When a job is given up: the same error of its own twice at a step, or too many attempts of one."""

from __future__ import annotations

import pytest

from entities.orchestrator.job_state.retry_limits import (
    ROLL_BACKS,
    STEP_ATTEMPTS,
    Parked,
    RetryLimits,
    StepBroken,
    Unrecoverable,
)
from schemas.registry import InstanceState, ServiceRecord
from tests.builders.records import instance


def ended(sid: str = "j-s0-r0", *, fault: str = "internal") -> ServiceRecord:
    reason = "ValueError: no such word (users.py:7)" if fault else "killed by SIGKILL"
    return instance(sid, state=InstanceState.FAULTED, reason=reason, fault=fault)


def attempt(setbacks: RetryLimits, step: int, *records: ServiceRecord) -> None:
    setbacks.attempt_failed(step, "lost j-s0-r0")
    setbacks.ended(step, records)


def test_the_same_error_twice_at_one_step_is_the_jobs_own() -> None:
    setbacks = RetryLimits()
    attempt(setbacks, 3, ended())
    with pytest.raises(Unrecoverable, match=r"^step 3 fails each time: j-s0-r1: ValueError: no such word"):
        attempt(setbacks, 3, ended("j-s0-r1"))


def test_replicas_that_meet_it_in_one_attempt_count_once() -> None:
    setbacks = RetryLimits()
    attempt(setbacks, 3, ended(), ended("j-s0-r1"))
    setbacks.ended(3, [ended("j-s0-r2")])  # was found while the first two were replaced


def test_a_roll_back_does_not_hide_it() -> None:
    setbacks = RetryLimits()
    attempt(setbacks, 3, ended())
    for step in range(3):
        setbacks.committed(step)
    with pytest.raises(Unrecoverable, match="step 3 fails each time"):
        attempt(setbacks, 3, ended())


@pytest.mark.parametrize(
    "other",
    [ended("j-s1-r0"), ended(fault="gradient_refused"), ended(fault="")],
    ids=["stage", "code", "kill"],
)
def test_what_differs_is_tried_again(other: ServiceRecord) -> None:
    setbacks = RetryLimits()
    attempt(setbacks, 3, ended())
    attempt(setbacks, 3, other)


def test_a_step_that_was_passed_is_forgotten() -> None:
    setbacks = RetryLimits()
    attempt(setbacks, 3, ended())
    setbacks.committed(3)
    attempt(setbacks, 4, ended())


def test_kills_are_survived_up_to_a_limit_per_step() -> None:
    setbacks = RetryLimits()
    for _ in range(STEP_ATTEMPTS):
        attempt(setbacks, 3, ended(fault=""))
    attempt(setbacks, 4, ended(fault=""))
    with pytest.raises(StepBroken, match=r"step 3 failed 7 times, the last: lost j-s0-r0"):
        attempt(setbacks, 3, ended(fault=""))
    attempt(setbacks, 3, ended(fault=""))  # behind the roll-back it counts anew


def test_roll_backs_that_lead_no_further_park_the_job() -> None:
    setbacks = RetryLimits()
    for step in range(5):
        setbacks.committed(step)
    for _ in range(ROLL_BACKS - 1):
        setbacks.rolling_back("step 5 failed 7 times")
        for step in range(2, 5):
            setbacks.committed(step)  # what was committed before is no news
    with pytest.raises(
        Parked, match=r"^3 times back to the checkpoint, and no step further: step 5"
    ) as parked:
        setbacks.rolling_back("step 5 failed 7 times")
    assert not parked.value.for_room
    setbacks.rolling_back("resumed, it has all its tries again")


def test_one_step_further_and_roll_backs_count_anew() -> None:
    setbacks = RetryLimits()
    for step in range(3 * ROLL_BACKS):
        setbacks.rolling_back("a bad day")
        setbacks.committed(step)


def test_a_new_orchestrator_counts_roll_backs_on() -> None:
    before = RetryLimits()
    before.committed(4)
    for _ in range(ROLL_BACKS - 1):
        before.rolling_back("no")
    after = RetryLimits(before.snapshot, roll_backs=before.roll_backs, furthest=before.furthest)
    after.committed(3)
    with pytest.raises(Parked):
        after.rolling_back("no")
