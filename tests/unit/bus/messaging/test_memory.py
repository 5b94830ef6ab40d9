"""What a service remembers of the commands that it answered."""

from __future__ import annotations

from bus.messaging.handlers import REMEMBERED_BYTES, REMEMBERED_CALLS, ReplyCache
from schemas.limits import REMEMBERED_S


def test_a_new_call_runs_a_repeat_waits_and_both_get_the_answer() -> None:
    memory = ReplyCache()
    assert memory.admit(("c1",), "inbox1", 0.0) is True
    assert memory.admit(("c1",), "inbox2", 0.1) is False
    assert memory.settle(("c1",), b"answer", 0.2) == {"inbox1", "inbox2"}
    assert memory.admit(("c1",), "inbox3", 0.3) == b"answer"


def test_a_call_cut_short_may_run_again() -> None:
    memory = ReplyCache()
    memory.admit(("c1",), "inbox1", 0.0)
    assert memory.settle(("c1",), None, 0.1) == {"inbox1"}
    assert memory.admit(("c1",), "inbox2", 0.2) is True


def test_answers_are_forgotten_by_age_number_and_size_but_running_calls_never() -> None:
    memory = ReplyCache()
    memory.admit(("running",), "inbox", 0.0)
    memory.admit(("old",), "inbox", 0.0)
    memory.settle(("old",), b"x", 0.0)
    assert memory.admit(("old",), "inbox", REMEMBERED_S + 1) is True
    memory.settle(("old",), b"x", REMEMBERED_S + 1)
    for number in range(REMEMBERED_CALLS + 10):
        memory.admit((str(number),), "inbox", 100.0)
        memory.settle((str(number),), b"x", 100.0)
    assert len(memory.answered) == REMEMBERED_CALLS
    for number in range(5):
        memory.admit((f"big{number}",), "inbox", 100.0)
        memory.settle((f"big{number}",), b"x" * (REMEMBERED_BYTES // 3), 100.0)
    assert memory.size <= REMEMBERED_BYTES
    assert memory.size == sum(len(entry.reply) for entry in memory.answered.values())
    assert memory.admit(("running",), "inbox2", 1e6) is False


def test_a_settled_call_replaces_its_expired_answer() -> None:
    memory = ReplyCache()
    memory.admit(("c",), "inbox", 0.0)
    memory.settle(("c",), b"one", 0.0)
    memory.admit(("c",), "inbox", REMEMBERED_S + 1)
    memory.settle(("c",), b"three", REMEMBERED_S + 1)
    assert memory.admit(("c",), "inbox", REMEMBERED_S + 2) == b"three"
    assert memory.size == 5
