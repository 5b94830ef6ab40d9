"""Who displaces whom: a class is inherited, taken back, and left alone where an operator gave it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from bus.scheduling_class import displace_nobody, displace_others, displacing_nobody

T = TypeVar("T")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these classes")


def on_a_thread(work: Callable[[], T]) -> T:
    """The class is a thread's own: that of the tests stays."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def of_a_child() -> int:
    code = "import os; print(os.sched_getscheduler(0))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def test_what_is_started_inherits_it_until_it_takes_it_back() -> None:
    def work() -> list[object]:
        seen: list[object] = [displace_nobody(), displace_nobody(), os.sched_getscheduler(0), of_a_child()]
        displace_others()
        return [*seen, os.sched_getscheduler(0)]

    assert on_a_thread(work) == [True, False, os.SCHED_BATCH, os.SCHED_BATCH, os.SCHED_OTHER]


def test_only_what_is_started_within_displaces_nobody() -> None:
    def work() -> list[int]:
        with displacing_nobody():
            inside = of_a_child()
        return [inside, os.sched_getscheduler(0)]

    assert on_a_thread(work) == [os.SCHED_BATCH, os.SCHED_OTHER]


def test_a_class_that_an_operator_gave_stays() -> None:
    def work() -> list[int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with displacing_nobody():
            inside = os.sched_getscheduler(0)
        displace_others()
        return [inside, os.sched_getscheduler(0)]

    assert on_a_thread(work) == [os.SCHED_IDLE, os.SCHED_IDLE]
