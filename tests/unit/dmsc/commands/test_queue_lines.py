"""What `dmsc queue` prints."""

from __future__ import annotations

from datetime import datetime

import pytest

from dmsc.commands.jobs.queue import explained, lasting, summary, when
from schemas.errors import BadInput
from schemas.queue import QueueExplained, QueuePlace, QueueStatus

PLACE = QueuePlace(
    position=2,
    job="j1",
    name="gpt",
    slots=4,
    parked=False,
    since=0.0,
    cause="behind",
    reason="behind j0, which comes first",
    blocker="j0",
)


def test_the_queue_in_one_line() -> None:
    status = QueueStatus(order="fcfs", slots=8, free=1, waiting=2, lacking=7, jobs=(PLACE,))
    assert summary(status) == "2 waiting by fcfs; 1 of 8 slots free, 7 more would have all start"


def test_one_job_explained() -> None:
    told = QueueExplained(remedies=("priority 1 instead of 0: it starts now",))
    status = QueueStatus(
        order="priority", slots=8, free=1, waiting=2, lacking=7, jobs=(PLACE,), explained=told
    )
    assert explained(status) == [
        "j1 (gpt) is 2 of 2, needs 4 slots",
        "waits:     behind j0, which comes first",
        "behind:    j0",
        "may start: not to be predicted",
        "or:        priority 1 instead of 0: it starts now",
    ]


def test_a_start_beyond_what_was_predicted() -> None:
    told = QueueExplained(later_than=datetime(2026, 11, 28, 23, 0).timestamp())
    status = QueueStatus(order="las", slots=8, free=1, waiting=2, lacking=7, jobs=(PLACE,), explained=told)
    line = next(line for line in explained(status) if line.startswith("may start"))
    assert line.startswith("may start: later than ")
    assert "23:00" in line


def test_time_spans() -> None:
    assert [lasting(seconds) for seconds in (7, 67, 3725)] == ["7 s", "1 min 07 s", "1 h 02 min"]


def test_a_time_is_a_clock_a_date_or_a_duration() -> None:
    now = datetime(2026, 11, 28, 23, 0).timestamp()
    assert when("8h", "--until", now + 60, now) == now + 60 + 8 * 3600
    assert when("0s", "--from", now, now) == now
    assert when("22:00", "--from", now, now) == datetime(2026, 11, 29, 22, 0).timestamp()
    assert when("23:30", "--from", now, now) == now + 1800
    assert when("2026-12-24T06:00", "--until", now, now) == datetime(2026, 12, 24, 6, 0).timestamp()
    for wrong in ("soon", "25:00", "2026-13-01", ""):
        with pytest.raises(BadInput, match=r"--until .*: give a local time \(22:00, 2026-12-24T06:00\)"):
            when(wrong, "--until", now, now)
