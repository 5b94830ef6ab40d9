"""Who goes on after a takeover."""

from __future__ import annotations

from entities.orchestrator.job_state.quarantine import BadMicrobatch, skip_decision
from entities.orchestrator.step.member_orders import commit_order
from entities.orchestrator.transaction.takeover_rules import ResumePoint, find_resume_point, outsiders
from schemas.step import Adopted, Member

A, B, C, D = (Member(sid=f"j-s0-r{number}", incarnation=name) for number, name in enumerate("abcd"))
BAD = BadMicrobatch(step=3, microbatch=1, stage=0, reason="no such word", sids=("j-s0-r0", "j-s0-r1"))


def answer(member: Member, version: int, attempt: int) -> Adopted:
    return Adopted(member=member, version=version, attempt=attempt, generation=6)


def test_whom_a_left_out_step_names_goes_on_although_nothing_was_prepared() -> None:
    """A has it already, B not yet; C was about to join with the state of before, D never obeyed."""
    decision = skip_decision(
        "j", 1, ResumePoint(step=3, attempt=2, generation=6, stages=((A, B, D),), data=()), BAD
    )
    answers = [answer(A, 4, 2), answer(B, 3, 2), answer(C, 3, 2), answer(D, 3, 1)]
    resume_point = find_resume_point(decision, answers, dict.fromkeys((A, B, C, D), 0), 1)
    assert resume_point.stages == ((A, B),)
    assert resume_point.recommit == (B,)
    assert (resume_point.step, resume_point.attempt, resume_point.generation) == (4, 3, 7)
    assert commit_order(decision, 0, 2).quarantined == (1,)


def test_whoever_does_not_go_on_is_named_to_the_others() -> None:
    resume_point = ResumePoint(step=4, attempt=3, generation=7, stages=((A, B),), data=(D,))
    assert outsiders([D, C, B, A], resume_point) == (C,)


def test_whom_a_former_leader_had_fenced_does_not_go_on_although_it_is_at_the_step() -> None:
    """C had not caught up when the former leader began; A takes nothing from it any more."""
    fencing = Adopted(member=A, version=0, attempt=2, generation=6, fenced=(C, D))
    answers = [fencing, answer(B, 0, 2), answer(C, 0, 0), answer(D, 0, 0)]
    resume_point = find_resume_point(None, answers, {A: 0, B: 0, C: 0, D: -1}, 1)
    assert (resume_point.stages, resume_point.data) == (((A, B),), ())
