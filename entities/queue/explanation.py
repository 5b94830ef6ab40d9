"""What a person is told about a waiting job: position, blocker, expected start, what would change it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from entities.queue.decision import Cause, Hold
from entities.queue.queue_rules import QueueOrder
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob
from entities.queue.scheduling import QueueSurroundings, decide
from entities.queue.virtual_queue import VirtualQueue

MOST_DECISIONS = 2_000
"""Decisions in virtual time after which an expected start is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueExplanation:
    """`position`: from 1. `starts_at`: if all predictions hold and nothing new comes; None: unknown."""

    job: str
    position: int
    of: int
    cause: Cause | None
    reason: str
    blocker: str = ""
    starts_at: float | None = None
    remedies: tuple[str, ...] = ()


def explain(
    job: str,
    queue: Sequence[QueuedJob],
    running: Sequence[ActiveJob],
    around: QueueSurroundings,
    now: float,
) -> QueueExplanation:
    """Why a job waits, and until when.

    The expected start is that of the same decisions in virtual time, by predicted ends.

    Raises:
        KeyError: no such job waits.
    """
    mine = {each.request.job: each for each in queue}[job]
    decision = decide(queue, running, around, now)
    position = decision.order.index(job) + 1
    hold = decision.holds.get(job)
    if hold is None:
        return QueueExplanation(
            job=job, position=position, of=len(queue), cause=None, reason="starts now", starts_at=now
        )
    starts_at = hold.expected_at
    if hold.cause not in (Cause.HELD, Cause.NEVER, Cause.PLAN):  # nobody plans in virtual time
        starts_at = expected_start(job, queue, running, around, now)
    return QueueExplanation(
        job=job,
        position=position,
        of=len(queue),
        cause=hold.cause,
        reason=hold.reason,
        blocker=hold.blocker,
        starts_at=starts_at,
        remedies=_remedies(mine, hold, queue, running, around, now),
    )


def expected_start(
    job: str,
    queue: Sequence[QueuedJob],
    running: Sequence[ActiveJob],
    around: QueueSurroundings,
    now: float,
) -> float | None:
    """When a waiting job starts if nothing new comes; None: not within what can be predicted."""
    ahead = VirtualQueue(around=replace(around, trials={}))
    ahead.adopt(queue, running, now)
    course = ahead.courses[job]
    ahead.run(lambda: course.first_start_at is not None or ahead.decisions >= MOST_DECISIONS)
    return course.first_start_at


def _remedies(
    mine: QueuedJob,
    hold: Hold,
    queue: Sequence[QueuedJob],
    running: Sequence[ActiveJob],
    around: QueueSurroundings,
    now: float,
) -> tuple[str, ...]:
    """What would have the job start now; each is tried."""
    request, remedies = mine.request, []
    if hold.cause is Cause.HELD:
        return (f"`dmsc resume {request.job}` lets it go",)
    if hold.cause is Cause.NEVER:
        return ()

    def starts(other: JobRequest) -> bool:
        changed = [each if each is not mine else replace(mine, request=other) for each in queue]
        return request.job not in decide(changed, running, around, now).holds

    least = request.replicas.least
    for fewer in range(least - 1, 0, -1):
        if starts(replace(request, replicas=replace(request.replicas, least=fewer))):
            remedies.append(f"replicas.min {fewer} instead of {least}: it starts now")
            break
    if around.rules.order is QueueOrder.PRIORITY:
        there = [*(job.request for job in queue), *(job.request for job in running)]
        above = max(other.priority for other in there) + 1
        if starts(replace(request, priority=above)):
            remedies.append(f"priority {above} instead of {request.priority}: it starts now")
    if mine.work_s is None and request.wall_time_s is None and hold.cause is Cause.BEHIND:
        remedies.append("a wall_time: without one nobody knows whether it would delay others")
    return tuple(remedies)
