"""Which microbatch is bad, which was only unlucky, and what the job does then."""

from __future__ import annotations

import pytest

from entities.orchestrator.job_state.quarantine import SKIPS_IN_A_ROW, Quarantine, skip_decision
from entities.orchestrator.job_state.retry_limits import STEP_ATTEMPTS, RetryLimits, StepBroken, Unrecoverable
from entities.orchestrator.transaction.takeover_rules import ResumePoint
from schemas.registry import Culprit, InstanceState, ServiceRecord
from schemas.step import Member
from tests.builders.records import instance


def ended(
    incarnation: str, step: int = 3, microbatch: int = 1, sid: str = "j-s0-r0", culprit: bool = True
) -> ServiceRecord:
    return instance(
        sid,
        incarnation=incarnation,
        state=InstanceState.FAULTED,
        reason=f"microbatch {microbatch}: LookupError: no such word (users.py:7)",
        fault="microbatch_failed",
        culprit=Culprit(step=step, microbatch=microbatch) if culprit else None,
    )


def test_two_incarnations_stop_the_job_with_one_line() -> None:
    quarantine = Quarantine("stop")
    assert quarantine.ended([ended("a")]) == []
    with pytest.raises(Unrecoverable) as stopped:
        quarantine.ended([ended("b", sid="j-s0-r1")])
    assert stopped.value.text == (
        "step 3, microbatch 1, stage 0: LookupError: no such word (users.py:7) "
        "(failed on 2 instances: j-s0-r0, j-s0-r1); "
        "mend it, or set training.on_bad_microbatch to skip: then such steps are left out"
    )


def test_the_same_incarnation_heard_of_twice_is_one() -> None:
    quarantine = Quarantine("stop")
    quarantine.ended([ended("a"), ended("a")])
    assert quarantine.ended([ended("a")]) == []


def test_other_microbatches_and_other_ends_count_for_nothing() -> None:
    quarantine = Quarantine("stop")
    quarantine.ended([ended("a"), ended("b", microbatch=0), ended("c", step=4), ended("d", culprit=False)])
    assert quarantine.of(3) is None


def test_a_step_that_was_committed_after_all_was_the_machines_fault() -> None:
    quarantine = Quarantine("skip")
    quarantine.ended([ended("a")])
    quarantine.committed(3)
    assert quarantine.ended([ended("b")]) == []


def test_a_step_is_left_out_and_stays_so_after_a_roll_back() -> None:
    quarantine = Quarantine("skip")
    quarantine.ended([ended("a")])
    (bad,) = quarantine.ended([ended("b")])
    assert (bad.step, bad.microbatch, bad.sids) == (3, 1, ("j-s0-r0", "j-s0-r0"))
    quarantine.committed(3)
    assert quarantine.of(3) == bad
    assert quarantine.of(2) is None


def test_a_new_orchestrator_knows_what_is_bad_and_what_failed_once() -> None:
    before = Quarantine("skip")
    before.ended([ended("a"), ended("b")])
    before.ended([ended("c", step=5)])
    before.committed(3)
    after = Quarantine("skip", before.snapshot)
    assert after.of(3) == before.of(3)
    assert after.of(3) is not None
    assert after.of(5) is None
    (bad,) = after.ended([ended("d", step=5, sid="j-s0-r1")])  # the second, by another's count
    assert bad.sids == ("j-s0-r0", "j-s0-r1")
    after.committed(5)
    assert [one.step for one in after.snapshot] == [3, 5]


def test_a_new_orchestrator_counts_on_from_the_attempts_and_errors_before_it() -> None:
    before = RetryLimits()
    before.attempt_failed(3, "lost j-s0-r0")
    before.ended(3, [ended("a", culprit=False)])
    after = RetryLimits(before.snapshot)
    after.attempt_failed(3, "lost j-s0-r1")
    with pytest.raises(Unrecoverable, match=r"^step 3 fails each time"):
        after.ended(3, [ended("b", culprit=False)])
    again = RetryLimits(after.snapshot)
    for _ in range(STEP_ATTEMPTS - 2):
        again.attempt_failed(3, "lost")
    with pytest.raises(StepBroken, match=r"^step 3 failed 7 times"):
        again.attempt_failed(3, "lost")
    again.committed(3)
    assert again.snapshot == ()


def test_too_many_steps_in_a_row_are_no_matter_of_data() -> None:
    quarantine = Quarantine("skip")
    steps = [0, 1, *range(3, 3 + SKIPS_IN_A_ROW)]
    for step in steps[:-1]:
        quarantine.ended([ended(f"a{step}", step), ended(f"b{step}", step)])
    with pytest.raises(Unrecoverable, match=r"^steps 3 to 5 can't be computed: .*no such word"):
        quarantine.ended([ended("a", steps[-1]), ended("b", steps[-1])])


def test_setbacks_leave_named_microbatches_to_the_quarantine_but_count_attempts() -> None:
    setbacks = RetryLimits()
    for attempt in range(STEP_ATTEMPTS):
        setbacks.attempt_failed(3, "lost j-s0-r0")
        setbacks.ended(3, [ended(f"i{attempt}")])
    with pytest.raises(StepBroken, match=r"^step 3 failed 7 times"):
        setbacks.attempt_failed(3, "lost j-s0-r0")


def test_the_decision_names_whom_it_is_for_and_needs_no_prepare() -> None:
    quarantine = Quarantine("skip")
    quarantine.ended([ended("a")])
    (bad,) = quarantine.ended([ended("b")])
    members = (
        (Member(sid="s0r0", incarnation="a"), Member(sid="s0r1", incarnation="b")),
        (Member(sid="s1r0", incarnation="c"),),
    )
    resume_point = ResumePoint(step=3, attempt=4, generation=5, stages=members, data=())
    decision = skip_decision("j", 2, resume_point, bad)
    assert (decision.action, decision.quarantined, decision.checksums) == ("skip", (1,), ("", ""))
    assert (decision.epoch, decision.step, decision.attempt) == (2, 3, 4)
    assert (decision.membership, decision.generations) == (members, (5, 5))
