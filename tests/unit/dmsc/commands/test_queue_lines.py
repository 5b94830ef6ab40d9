"""What `dmsc queue` prints."""

from __future__ import annotations

from dmsc.commands.jobs.queue import explained, lasting, summary
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


def test_time_spans() -> None:
    assert [lasting(seconds) for seconds in (7, 67, 3725)] == ["7 s", "1 min 07 s", "1 h 02 min"]
