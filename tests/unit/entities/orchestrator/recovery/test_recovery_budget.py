"""How often a job's own code may fail before the job is parked (ADR-0059)."""

from __future__ import annotations

import pytest

from entities.orchestrator.job_state.retry_limits import Parked
from entities.orchestrator.recovery.recovery_budget import RecoveryBudget
from schemas.job_file.recovery import RecoverySpec
from schemas.registry import InstanceState, ServiceRecord
from tests.builders.records import instance


def ended(sid: str = "j-s0-r0", fault: str = "microbatch_failed") -> ServiceRecord:
    reason = "microbatch 2: ValueError: no such word (users.py:7)"
    return instance(sid, state=InstanceState.FAULTED, reason=reason, fault=fault)


def budget(max_recoveries: int | None = 2, within_s: float = 60.0) -> RecoveryBudget:
    return RecoveryBudget("j", RecoverySpec(max_recoveries=max_recoveries, within_s=within_s))


def fail(counted: RecoveryBudget, *times: float, fault: str = "microbatch_failed") -> None:
    """At each of these times, each at a step of its own."""
    for at in times:
        counted.ended([ended(fault=fault)], step=int(at), now=at)


def test_one_recovery_more_than_allowed_parks_the_job_with_one_line() -> None:
    counted = budget()
    fail(counted, 1.0, 2.0)
    with pytest.raises(Parked) as parked:
        fail(counted, 43.0)
    assert parked.value.text == (
        "the job's own code failed 3 times within 42 s, and recovery.max_recoveries is 2 within 60 s; "
        "the last time j-s0-r0 at step 43: microbatch 2: ValueError: no such word (users.py:7); "
        "mend what it names, then `dmsc resume j`"
    )
    assert parked.value.by_person


def test_after_that_it_begins_anew() -> None:
    counted = budget(0)
    for at in (1.0, 2.0):
        with pytest.raises(Parked, match="failed 1 times"):
            fail(counted, at)
    assert counted.snapshot == ()


def test_what_is_long_ago_counts_no_longer() -> None:
    fail(budget(), 0.0, 50.0, 61.0, 111.0, 122.0)


@pytest.mark.parametrize("fault", ["", "fenced", "damaged_checkpoint"])
def test_kills_and_lost_nodes_never_count(fault: str) -> None:
    fail(budget(0), *range(100), fault=fault)


@pytest.mark.parametrize("fault", ["microbatch_failed", "gradient_refused", "bad_data", "internal"])
def test_the_jobs_own_errors_do(fault: str) -> None:
    with pytest.raises(Parked):
        fail(budget(0), 1.0, fault=fault)


def test_without_a_limit_any_number_is_recovered() -> None:
    counted = budget(None)
    fail(counted, *range(100))
    assert counted.snapshot == ()


def test_replicas_that_fail_at_once_are_one_recovery() -> None:
    counted = budget(1)
    counted.ended([ended(f"j-s0-r{number}") for number in range(64)], step=3, now=1.0)
    with pytest.raises(Parked, match="failed 2 times"):
        counted.ended([ended("j-s0-r7")], step=3, now=2.0)


def test_what_a_left_out_step_cost_counts_no_longer() -> None:
    counted = budget(1)
    counted.ended([ended()], step=3, now=1.0)
    counted.left_out(3)
    counted.ended([ended()], step=4, now=2.0)


def test_a_new_orchestrator_counts_on() -> None:
    counted = budget(1)
    fail(counted, 1.0)
    successor = RecoveryBudget("j", RecoverySpec(max_recoveries=1), counted.snapshot)
    with pytest.raises(Parked):
        fail(successor, 2.0)
