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
MOST_LOOKS = 200_000
"""Jobs at which all of these decisions look, after which it is given up, too: about a second of a thread."""


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """`at`: if all predictions hold and nothing new comes; None: unknown.

    `later_than`: up to there it was predicted, and it does not start.
    """

    at: float | None
    later_than: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueExplanation:
    """`position`: from 1. `starts_at`, `later_than`: see `ExpectedStart`."""

    job: str
    position: int
    of: int
    cause: Cause | None
    reason: str
    blocker: str = ""
    starts_at: float | None = None
    later_than: float | None = None
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
    start = ExpectedStart(hold.expected_at)
    if hold.cause not in (Cause.HELD, Cause.NEVER, Cause.PLAN):  # nobody plans in virtual time
        start = expected_start(job, queue, running, around, now)
    return QueueExplanation(
        job=job,
        position=position,
        of=len(queue),
        cause=hold.cause,
        reason=hold.reason,
        blocker=hold.blocker,
        starts_at=start.at,
        later_than=start.later_than,
        remedies=_remedies(mine, hold, queue, running, around, now),
    )


def expected_start(
    job: str,
    queue: Sequence[QueuedJob],
    running: Sequence[ActiveJob],
    around: QueueSurroundings,
    now: float,
) -> ExpectedStart:
    """When a waiting job starts if nothing new comes, as far as that takes no more than `MOST_LOOKS`."""
    ahead = VirtualQueue(around=replace(around, trials={}))
    ahead.adopt(queue, running, now)
    course = ahead.courses[job]

    def over() -> bool:
        return ahead.decisions >= MOST_DECISIONS or ahead.looked >= MOST_LOOKS

    ahead.run(lambda: course.first_start_at is not None or over())
    given_up = course.first_start_at is None and ahead.pending
    return ExpectedStart(course.first_start_at, ahead.now if given_up else None)


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

    def starts_with(fewer: int) -> bool:
        return starts(replace(request, replicas=replace(request.replicas, least=fewer)))

    fewest, most = 0, least - 1  # with `fewest` it starts, if that is not 0
    while fewest < most:  # by halves, for each trial is a decision
        middle = (fewest + most + 1) // 2
        fewest, most = (middle, most) if starts_with(middle) else (fewest, middle - 1)
    if fewest:
        remedies.append(f"replicas.min {fewest} instead of {least}: it starts now")
    if around.rules.order is QueueOrder.PRIORITY:
        there = [*(job.request for job in queue), *(job.request for job in running)]
        above = max(other.priority for other in there) + 1
        if starts(replace(request, priority=above)):
            remedies.append(f"priority {above} instead of {request.priority}: it starts now")
    if mine.work_s is None and request.wall_time_s is None and hold.cause is Cause.BEHIND:
        remedies.append("a wall_time: without one nobody knows whether it would delay others")
    return tuple(remedies)
