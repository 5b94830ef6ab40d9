"""The fault queue's book: what is one fault, how often it was tried, and when it is over."""

from __future__ import annotations

import pytest

from entities.orchestrator.faults.fault_queue import LOG_COLUMNS, LOG_LINES, RETRIES, FaultBook
from schemas.errors import IllegalTransition
from schemas.fault import FaultKind, FaultRecord, FaultState, FaultTask, FaultVerdict
from tests.builders.faults import fault_verdict


def task(attempt: int = 0, incarnation: str = "a", **changes: object) -> FaultTask:
    base = {
        "job": "j",
        "step": 3,
        "attempt": attempt,
        "stage": 0,
        "sid": "j-s0-r0",
        "incarnation": incarnation,
    }
    return FaultTask.model_validate({**base, **changes})


def opened(
    book: FaultBook, id: str, what: FaultTask, kind: FaultKind = "instance", log: tuple[str, ...] = ("seen",)
) -> FaultRecord:
    return book.opened(id, kind, what, reporter="router-a", log=log, now=1.0)


def verdict(verdict: str = "structural", scope: str = "instance") -> FaultVerdict:
    return fault_verdict(verdict, scope=scope, incarnation="a", log=("Killed",))


def test_a_fault_from_report_to_end() -> None:
    book = FaultBook(RETRIES)
    first = opened(book, "f1", task())
    assert (first.state, first.attempts, first.limit) == (FaultState.OPEN, 1, 6)
    located = book.located("f1", verdict(), 2.0)
    assert located is not None
    assert (located.state, located.verdict, located.log) == (
        FaultState.LOCATED,
        "structural",
        ("seen", "Killed"),
    )
    retried = book.moved("f1", FaultState.RETRYING, "replaced", 3.0)
    assert retried is not None
    assert retried.action == "replaced"
    done = book.moved("f1", FaultState.HANDLED, "committed", 4.0)
    assert done is not None
    assert (done.opened_at, done.changed_at) == (1.0, 4.0)
    assert book.of_job("j") == []
    assert book.moved("f1", FaultState.HANDLED, "again", 5.0) is None


def test_the_same_task_failing_again_is_the_same_fault_once_more() -> None:
    book = FaultBook(RETRIES)
    opened(book, "f1", task())
    for attempt in range(1, 8):
        book.moved("f1", FaultState.RETRYING, "", 2.0)
        assert book.exhausted("f1") == (attempt > 6)
        again = opened(book, f"other-{attempt}", task(attempt, incarnation=f"i{attempt}"))
        assert (again.id, again.state, again.attempts) == ("f1", FaultState.OPEN, attempt + 1)
    assert book.exhausted("f1")


def test_reports_of_one_attempt_count_once_whoever_saw_it_and_how() -> None:
    book = FaultBook(RETRIES)
    opened(book, "f1", task(), "link", ("s1-r0 lost its link",))
    merged = opened(book, "f2", task(), "instance", ("killed by SIGKILL",))
    assert (merged.id, merged.attempts) == ("f1", 1)
    assert merged.log == ("s1-r0 lost its link", "killed by SIGKILL")
    located = book.located("f1", verdict(), 2.0)
    assert located is not None
    assert located.kind == "instance", "the link broke with who held it"


def test_a_link_alone_stays_one_and_a_node_takes_its_instances_along() -> None:
    book = FaultBook(RETRIES)
    opened(book, "f1", task(), "link")
    opened(book, "f2", task(sid="j-s0-r1", incarnation="b"), "instance")
    link = book.located("f1", verdict("transient", "none"), 2.0)
    node = book.located("f2", verdict(scope="node"), 2.0)
    assert link is not None
    assert node is not None
    assert (link.kind, node.kind) == ("link", "node")


def test_a_microbatch_is_the_same_wherever_it_fails() -> None:
    book = FaultBook(RETRIES)
    opened(book, "f1", task(microbatch=1), "microbatch")
    again = opened(book, "f2", task(1, sid="j-s0-r1", incarnation="b", microbatch=1), "microbatch")
    other = opened(book, "f3", task(1, sid="j-s0-r1", incarnation="b", microbatch=2), "microbatch")
    assert (again.id, again.attempts, again.task.sid) == ("f1", 2, "j-s0-r1")
    assert other.id == "f3"
    assert book.exhausted("f1")
    assert not book.exhausted("f3")


def test_a_resolved_fault_that_comes_again_is_a_new_one() -> None:
    book = FaultBook(RETRIES)
    opened(book, "f1", task())
    book.moved("f1", FaultState.HANDLED, "", 2.0)
    assert opened(book, "f2", task(1)).attempts == 1


def test_a_new_orchestrator_counts_the_tries_on() -> None:
    before = FaultBook({**RETRIES, "instance": 1})
    opened(before, "f1", task())
    left = before.moved("f1", FaultState.RETRYING, "repeat the step", 2.0)
    assert left is not None
    after = FaultBook({**RETRIES, "instance": 1})
    inherited = after.inherit(left, 3.0)
    assert inherited is not None
    assert (inherited.state, inherited.attempts) == (FaultState.RETRYING, 1)
    again = opened(after, "f2", task(attempt=2, incarnation="b"))
    assert (again.id, again.attempts) == ("f1", 2)
    assert after.exhausted("f1")
    assert after.inherit(left, 4.0) is None  # read late: it has failed here meanwhile


def test_logs_are_bounded() -> None:
    book = FaultBook(RETRIES)
    record = opened(book, "f1", task(), log=tuple(f"{number} " + "x" * 1000 for number in range(50)))
    assert len(record.log) == LOG_LINES
    assert max(map(len, record.log)) == LOG_COLUMNS
    assert record.log[-1].startswith("49 ")


def test_an_illegal_transition_is_refused() -> None:
    book = FaultBook(RETRIES)
    opened(book, "f1", task())
    book.moved("f1", FaultState.RETRYING, "", 2.0)
    with pytest.raises(IllegalTransition, match="fault f1: retrying → located"):
        book.moved("f1", FaultState.LOCATED, "", 3.0)
