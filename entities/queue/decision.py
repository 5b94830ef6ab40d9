"""What a decision of the queue says: jobs start, change their size, park, or wait, each for a reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from entities.queue.queued_job import ActiveJob


class Cause(StrEnum):
    """Why a job waits."""

    HELD = "held"
    AFTER = "after"
    NEVER = "never"
    ARRAY = "array"
    QUOTA = "quota"
    ROOM = "room"
    BEHIND = "behind"
    LEAVERS = "leavers"
    RESERVED = "reserved"
    PLAN = "plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """A job waits. `blocker`: the job or reservation for which. `expected_at`: when it may start."""

    cause: Cause
    reason: str
    blocker: str = ""
    expected_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """A job starts with all of these slots."""

    job: str
    replicas: int
    slots: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Resize:
    """A running job takes free slots, or leaves some, and has so many replicas then."""

    job: str
    replicas: int
    takes: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParkOrder:
    """A running job parks at `at`, after its notice. `held`: it then waits for a person.

    `blocker`: the job or reservation for which; it need not park if that does not wait any more.
    """

    job: str
    at: float
    reason: str
    blocker: str = ""
    held: bool = False


@dataclass(kw_only=True, slots=True)
class QueueDecision:
    """All that one look at the queue decides.

    `order`: the waiting jobs, first first, those that start included. `holds`: of each that goes on waiting.
    `head`: the first job that no displacement could help; later ones must not delay it (EASY). `next_at`:
    when to decide again even if nothing happens.
    """

    admissions: list[Admission] = field(default_factory=list)
    resizes: list[Resize] = field(default_factory=list)
    parks: list[ParkOrder] = field(default_factory=list)
    holds: dict[str, Hold] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    head: str = ""
    head_at: float | None = None
    next_at: float | None = None

    @property
    def changes(self) -> bool:
        """Whether anything is to be done."""
        return bool(self.admissions or self.resizes or self.parks)

    def again_at(self, at: float) -> None:
        """Asks for another decision at `at`."""
        if self.next_at is None or at < self.next_at:
            self.next_at = at


@dataclass(slots=True)
class RunChanges:
    """A running job in a decision. `replicas`, `slots`: what it will have. `leaves`: what it gives up."""

    job: ActiveJob
    replicas: int
    slots: list[str]
    leaves: list[str] = field(default_factory=list)
    takes: list[str] = field(default_factory=list)
    reason: str = ""
    parks: ParkOrder | None = None

    @property
    def changeable(self) -> bool:
        """Whether it may still be told to do something else."""
        job = self.job
        return self.parks is None and not job.gives_up and not job.leaving and not job.fixed

    @property
    def admission(self) -> Admission:
        """What it is told if it starts now."""
        return Admission(
            job=self.job.request.job, replicas=self.replicas, slots=tuple(self.slots), reason=self.reason
        )


@dataclass(frozen=True, slots=True)
class RoomOffer:
    """What a running job may give up: its last replica, or the rest of its slots (`parks`)."""

    state: RunChanges
    slots: tuple[str, ...]
    parks: bool = False
