"""A picture of the step is whole: nothing in it comes from what another part of it does not show yet."""

from __future__ import annotations

from schemas.data_plane import MicrobatchNotice
from schemas.step import Member
from tests.builders.steps import notice
from workers.routing.next_hop import Binder
from workers.transaction.consistent_snapshot import ConsistentSnapshot
from workers.transaction.stage_machine import StageMachine

ME = Member(sid="s1-r0", incarnation="i1")
BEFORE = Member(sid="s0-r0", incarnation="i1")


def offer(round_: int, *, step: int = 0) -> MicrobatchNotice:
    return notice(BEFORE, ME, step=step, round=round_)


def machine() -> StageMachine:
    return StageMachine(ME, epoch=1, stage=1, last=True, binder=Binder("a"))


def test_what_was_sent_after_a_picture_waits_for_this_part_of_it() -> None:
    stage = machine()
    assert stage.offered(offer(0)) == "accepted"
    assert stage.offered(offer(2)) == "later"
    assert stage.answer_round((1, 0, 2)) == ()
    assert stage.offered(offer(2)) == "accepted"


def test_a_picture_of_one_step_holds_nothing_up_in_the_next() -> None:
    stage = machine()
    stage.answer_round((1, 0, 2))
    assert stage.offered(offer(0, step=1)) == "accepted"
    assert stage.offered(offer(1, step=1)) == "later"


def test_a_newcomer_stands_behind_the_rounds_before_it() -> None:
    stage = machine()
    stage.admitted(0, (1, 0, 3))
    assert stage.offered(offer(3)) == "accepted"


def test_a_repeated_question_gets_the_first_answer() -> None:
    stage = machine()
    stage.answer_round((1, 0, 1))
    stage.arrived(offer(0), ())
    assert stage.answer_round((1, 0, 1)) == ()
    assert [hop.microbatch for hop in stage.answer_round((1, 0, 2))] == [0]


def test_an_older_round_does_not_go_back() -> None:
    snapshot = ConsistentSnapshot()
    snapshot.record((1, 0, 2), 0, ())
    snapshot.record((1, 0, 1), 0, ())
    assert snapshot.round(1, 0, 0) == 2
    assert snapshot.round(1, 0, 1) == 0


def test_after_a_roll_back_a_round_of_a_smaller_step_is_newer() -> None:
    snapshot = ConsistentSnapshot()
    snapshot.record((1, 0, 2), 7, ())
    snapshot.record((1, 1, 1), 3, ())
    assert snapshot.round(1, 3, 1) == 1
