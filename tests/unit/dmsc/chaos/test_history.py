"""Which commits count: roll-backs, lost and doubled steps and microbatches, on made-up event streams."""

from __future__ import annotations

from dmsc.chaos.history import Decided, History, count_work, read
from schemas.job import JobEvent
from schemas.step import MicrobatchClaim
from tests.builders import steps
from tests.builders.job_events import EVERYONE, MICROBATCHES, clean, noticed
from tests.builders.job_events import committed as step
from tests.builders.steps import member


def history(*events: JobEvent, steps: int | None = None, decided: tuple[Decided, ...] = ()) -> History:
    return read(events, decided, microbatches=MICROBATCHES, steps=steps)


def test_a_clean_run_loses_and_doubles_nothing() -> None:
    found = history(*clean(5), steps=5)
    assert (found.count.lost, found.count.doubled, found.count.checked_steps) == (0, 0, 5)
    assert [(one.step, one.began, one.ended) for one in found.advances] == [(n, n, n + 1.0) for n in range(5)]


def test_a_step_that_nobody_told_of_is_lost() -> None:
    events = clean(5)
    found = history(*events[:3], *events[4:], steps=5)
    assert found.count.lost_steps == (2,)


def test_steps_missing_at_the_end_of_a_finished_job_are_lost_of_an_unfinished_one_not() -> None:
    assert history(*clean(3), steps=5).count.lost_steps == (3, 4)
    assert history(*clean(3)).count.lost_steps == ()


def test_a_step_that_was_decided_but_not_told_is_not_lost() -> None:
    events = clean(5)
    found = history(*events[:3], *events[4:], steps=5, decided=(Decided(step=2, at=2.9),))
    assert found.count.lost == 0
    assert [(one.step, one.ended) for one in found.advances][2] == (2, 2.9)


def test_a_step_committed_twice_without_a_roll_back_is_doubled() -> None:
    found = history(*clean(3), step(2, 3.5, step_s=0.5), step(3, 4.5), steps=4)
    assert found.count.doubled_steps == (2,)
    assert found.undone == 0


def test_the_same_event_told_twice_is_one_step() -> None:
    events = clean(3)
    found = history(*events, events[-1], steps=3)
    assert found.count.doubled == 0


def test_steps_after_a_roll_back_are_redone_and_count_once() -> None:
    back = noticed("recovery", "a whole stage was lost: all back to step 1")
    again = [step(number, 10.0 + number, step_s=0.9) for number in range(1, 5)]
    found = history(*clean(4), noticed("fault"), back, *again, steps=5)
    assert (found.count.lost, found.count.doubled, found.undone) == (0, 0, 3)
    # the step that the fault fell into took from the last commit before it to the first one beyond
    last = found.advances[-1]
    assert (last.step, last.began, last.ended, last.redone_from) == (4, 4.0, 14.0, 1)
    assert len(found.advances) == 5


def test_microbatches_that_are_missing_or_counted_twice_show_in_the_shares() -> None:
    events = [EVERYONE, step(0, 1.0, shares=(2, 1, 4)), step(1, 2.0, shares=(2, 2, 6)), step(2, 3.0)]
    count = history(*events, steps=3).count
    assert (count.lost_microbatches, count.doubled_microbatches) == (1, 2)
    assert (count.lost, count.doubled) == (1, 2)


def test_shares_that_only_swap_between_replicas_are_right() -> None:
    count = history(EVERYONE, step(0, 1.0, shares=(0, 4, 4)), step(1, 2.0, shares=(4, 0, 4)), steps=2).count
    assert (count.lost, count.doubled) == (0, 0)


def test_shares_in_steps_that_were_rolled_back_do_not_count() -> None:
    events = [EVERYONE, step(0, 1.0), step(1, 2.0, shares=(1, 1, 1)), noticed("recovery"), step(1, 4.0)]
    assert history(*events, steps=2).count.lost == 0


def test_a_decision_on_the_bus_says_better_than_the_event_when_it_was() -> None:
    found = history(*clean(3), decided=(Decided(step=1, at=1.8), Decided(step=2, at=9.0)))
    assert [one.ended for one in found.advances] == [1.0, 1.8, 3.0]


def claim(microbatch: int, owner: str, forward_ms: float, **more: object) -> MicrobatchClaim:
    return steps.claim(microbatch, member("s", owner), forward_ms=forward_ms, **more)


def test_work_is_counted_once_however_often_it_is_claimed() -> None:
    work = count_work(
        [
            claim(0, "x", 10.1),
            claim(0, "x", 10.1, attempt=1),  # the same sum, told again
            claim(0, "x", 10.7, attempt=1),  # done again
            claim(1, "y", 9.9),
            claim(1, "y", 9.9, evaluate=True),
        ]
    )
    assert work.units == {3: 3}
    assert work.by_owner == {(3, "x"): 2, (3, "y"): 1}
