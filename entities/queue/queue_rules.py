"""How a queue decides: its order, and what it may do to make room."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from entities.queue.queued_job import JobRequest


class QueueOrder(StrEnum):
    """Who comes first. `fcfs`: by submission; `las`: least attained service (Tiresias, NSDI 2019)."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"
    LAS = "las"


class Backfill(StrEnum):
    """Who may start before the first job that has no room.

    `none`: nobody; `easy`: whoever does not delay it (Lifka, The ANL/IBM SP Scheduling System, 1995);
    `any`: whoever fits (first fit), so that a large job may wait for ever.
    """

    NONE = "none"
    EASY = "easy"
    ANY = "any"


@dataclass(frozen=True, kw_only=True)
class QueueRules:
    """The rules of one queue. Times in seconds."""

    order: QueueOrder = QueueOrder.FCFS
    backfill: Backfill = Backfill.EASY
    resize: bool = True
    """Whether running jobs shrink for waiting ones, and grow into idle slots."""
    park: bool = True
    """Whether running jobs park for those that come before them; reservations park in any case."""
    ageing_s: float = 6 * 3600.0
    """A job that waited so long rises by one class of priority, or level of service; 0: never."""
    half_life_s: float = 7 * 86400.0
    """After so long half of what a tenant has used is forgotten (`fair`)."""
    service_levels_slot_s: tuple[float, ...] = (3600.0, 4 * 3600.0, 16 * 3600.0, 64 * 3600.0)
    """Slot-seconds at which a job falls to the next level (`las`). More levels mean more parks."""
    cool_down_s: float = 600.0
    """A job is not parked sooner than this after it was started or parked."""
    resize_pause_s: float = 60.0
    """A job does not grow sooner than this after its size has changed."""
    notice_s: float = 0.0
    """From the decision that a job parks until it does; a job that asks for more gets that."""
    shrink_s: float = 5.0
    """Expected time from the order to shrink until the exit of the leavers is seen."""
    park_s: float = 30.0
    """The same of the order to park; with the way back it is the cost of a park."""
    trial_pause_s: float = 1.0
    """Until the next decision, if one has tried as many plans as it may."""
    least_gain: float = 0.10
    """A job grows beyond `want` while one replica more saves at least this share of its step."""
    urgent_share: float = 0.5
    """A job goes to the front of its class when its deadline leaves less slack than this share of its run."""

    def __post_init__(self) -> None:
        if list(self.service_levels_slot_s) != sorted(set(self.service_levels_slot_s)):
            raise ValueError(f"service levels {self.service_levels_slot_s}: give them in rising order")
        if not 0.0 < self.least_gain < 1.0:
            raise ValueError(f"least gain {self.least_gain}: give a share between 0 and 1")

    def notice_of(self, request: JobRequest) -> float:
        """How long before a park the job is told."""
        return max(self.notice_s, request.notice_s)
