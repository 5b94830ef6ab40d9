"""The queue at a glance, and what one waiting job is told."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message, Part, Time, Token

MOST_LISTED = 1000
"""Waiting jobs that one answer lists; `waiting` counts all."""


class QueueQuery(Message, wire="queue.query"):
    """MG → SMO: who waits, and for what; with `job`, its expected start and what would change that."""

    job: Token | None = None


class QueuePlace(Part):
    """One waiting job. `slots`: the fewest with which it starts."""

    position: int = Field(ge=1)
    job: Token
    name: str
    user: str = ""
    priority: int = 0
    slots: int
    parked: bool = Field(description="it has begun, and waits at a checkpoint")
    since: Time = Field(description="when it was submitted")
    cause: str = Field(
        description="room, behind, leavers, reserved, quota, held, after, never, …; empty: it starts"
    )
    reason: str
    blocker: str = Field("", description="the job for which it waits")
    expected_at: Time | None = Field(None, description="when it may start, as far as that is known")


class QueueExplained(Part):
    """What one waiting job is told, beside its place."""

    starts_at: Time | None = Field(
        None, description="if all predictions hold and nothing new comes; null: not to be predicted"
    )
    remedies: tuple[str, ...] = Field((), description="what would have it start now; each was tried")


class QueueStatus(Message, wire="queue.status"):
    """SMO → MG: the queue, first first."""

    order: str
    slots: int = Field(description="that are not cordoned")
    free: int
    waiting: int
    lacking: int = Field(
        description="slots that would have to be there beside the free ones, for all to start"
    )
    jobs: tuple[QueuePlace, ...] = Field((), description=f"at most {MOST_LISTED}; the one that was asked for")
    explained: QueueExplained | None = None
