"""The queue at a glance, and what one waiting job is told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.job_file.parallel import MOST_INSTANCES

ReservationName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]

MOST_LISTED = 1000
"""Waiting jobs that one answer lists; `waiting` counts all."""
MOST_DEMANDS = 64
"""Kinds of slots that one message lists; `lacking` counts all."""


class QueueShare(Part):
    """What a quota says of its users' part of the queue; `guaranteed_slots` is beside it (ADR-0108)."""

    tenant: str = Field(
        "",
        max_length=120,
        description="with whose other users this one shares all that; empty: it is the user's own",
    )
    running_slots: int | None = Field(
        None,
        ge=0,
        le=1_000_000,
        description="that jobs may hold at a time, borrowed ones too; further jobs wait",
    )
    weight: float = Field(1.0, gt=0, le=1e6, description="twice as much is due to a weight of 2 (`fair`)")


class QueueQuery(Message, wire="queue.query"):
    """MG → SMO: who waits, and for what; with `job`, its expected start and what would change that.

    `job` may be an array: then it is about the member that comes first.
    """

    job: Token | None = None


class QueuePlace(Part):
    """One waiting job or build. `slots`: the fewest with which it starts; of a build these are lanes."""

    position: int = Field(ge=1)
    job: Token
    work: Literal["training", "preparation"] = Field(
        "training", description="preparation: a build of a data set, which waits for lanes, not for slots"
    )
    name: str
    array: str = Field("", description="of which it is a member")
    user: str = ""
    priority: int = 0
    slots: int
    parked: bool = Field(description="it has begun, and waits at a checkpoint")
    since: Time = Field(description="when it was submitted")
    cause: str = Field(
        description="room, behind, leavers, reserved, quota, held, after, array, never, …; empty: it starts"
    )
    reason: str
    blocker: str = Field("", description="the job for which it waits")
    expected_at: Time | None = Field(None, description="when it may start, as far as that is known")


class QueueExplained(Part):
    """What one waiting job is told, beside its place."""

    starts_at: Time | None = Field(
        None, description="if all predictions hold and nothing new comes; null: not to be predicted"
    )
    later_than: Time | None = Field(
        None, description="the prediction was given up there, since it would have taken too long"
    )
    remedies: tuple[str, ...] = Field((), description="what would have it start now; each was tried")


class ParkNotice(Part):
    """A running job that was told that it will park."""

    job: Token
    at: Time
    reason: str
    blocker: str = Field("", description="the job or reservation for which; if that ends, the job goes on")


class ReservationSpec(Part):
    """Slots that are kept from one time until another, for a user or a job; for neither: for nobody."""

    name: ReservationName
    slots: int = Field(ge=1, le=MOST_INSTANCES)
    start_at: Time
    end_at: Time
    user: str = Field("", max_length=120, description="whose jobs may use them")
    job: str = Field("", max_length=120, description="the one job that may use them")
    device: str = Field("", max_length=120, description="kind of device; empty: any")
    clusters: tuple[Token, ...] = Field((), max_length=64)
    labels: dict[str, str] = Field({}, description="that the slots have")


class SlotsReserved(Message, wire="queue.reserved"):
    """A reservation, in the bucket `reservations` by its name."""

    spec: ReservationSpec
    by: str
    at: Time


class ReserveSlots(Message, wire="queue.reserve"):
    """MG → SMO: keep slots from one time until another."""

    spec: ReservationSpec
    by: str


class CancelReservation(Message, wire="queue.cancel_reservation"):
    """MG → SMO: nothing is kept by this reservation any more."""

    name: ReservationName
    by: str


class ReservationsQuery(Message, wire="queue.reservations_query"):
    """MG → SMO: which slots are kept."""


class Reservations(Message, wire="queue.reservations"):
    """SMO → MG: all reservations that have not ended, by their start."""

    reservations: tuple[SlotsReserved, ...] = ()


class CapacityDemand(Part):
    """Waiting jobs that need the same kind of slots. Empty fields mean: any."""

    device: str = Field("", description="kind of device")
    precision: str = Field("", description="in which it computes without emulation")
    bits_class: str = Field("", description="class of bits that a job which has begun stays in")
    clusters: tuple[Token, ...] = ()
    labels: dict[str, str] = Field({}, description="that the node has")
    memory_bytes: int = Field(0, ge=0, description="of each slot, at least (`kind: memory` on all layers)")
    jobs: int
    slots: int = Field(description="the fewest with which all of them run")
    lacking: int = Field(description="slots of this kind that have to be there beside the free ones")
    since: Time = Field(description="since when the first of them waits")


class QueueCapacity(Message, wire="queue.capacity"):
    """SMO → whoever adds nodes: the capacity that the queue wants, on change and every 10 s.

    Held jobs, and those that wait for other jobs, want none. Slots that jobs are leaving count as free.
    """

    slots: int = Field(description="that are not cordoned")
    free: int
    waiting: int = Field(description="jobs, also those that want no slots now")
    lacking: int = Field(description="of all demands, also of those that are not listed")
    since: Time | None = Field(None, description="since when a job waits for slots that are not there")
    demands: tuple[CapacityDemand, ...] = Field(
        (), description=f"the {MOST_DEMANDS} that lack most, most first"
    )


class QueueStatus(Message, wire="queue.status", version=(1, 5)):
    """SMO → MG: the queue, first first."""

    order: str
    slots: int = Field(description="that are not cordoned")
    free: int
    waiting: int = Field(description="jobs and builds")
    lacking: int = Field(
        description="slots that would have to be there beside the free ones, for all to start"
    )
    jobs: tuple[QueuePlace, ...] = Field((), description=f"at most {MOST_LISTED}; the one that was asked for")
    explained: QueueExplained | None = None
    demands: tuple[CapacityDemand, ...] = Field((), description="what they lack, by kind of slot")
    reservations: tuple[SlotsReserved, ...] = Field(
        (), description="those that have not ended, by their start"
    )
    notices: tuple[ParkNotice, ...] = Field((), description="running jobs that will park, by their time")
