"""What a job asks for (`JobRequest`), and how far it is: it waits (`QueuedJob`) or runs (`ActiveJob`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from entities.queue.slot_pools import ANY_SLOT, SlotNeeds


class WorkKind(StrEnum):
    """What is done with the places. Training takes slots; preparation takes lanes, which are beside them."""

    TRAINING = "training"
    PREPARATION = "preparation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """How many replicas a job may have: at least `least`, best `want`, at most `most`."""

    least: int = 1
    want: int = 1
    most: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.want <= self.most:
            raise ValueError(
                f"replicas: min {self.least}, want {self.want}, max {self.most}: give 1 ≤ min ≤ want ≤ max"
            )


ONE = Replicas()
NO_PREFERENCE = 1 << 30
"""The position of jobs that a suggested order does not name: behind those that it names."""
GROWTH = 0.8
"""What a replica beyond `want` adds where nobody knows, of what each of `want` contributes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """What one job asks for; it is the same before, during and after a run.

    `replica_slots`: slots of each replica, one per stage; `other_slots`: those that do not grow with the
    replicas, such as standbys. `speeds`: with the least, …, the most replicas, 1 with `want`, as forecast;
    empty: in proportion up to `want`; beyond it a replica adds `growth` of what each of `want` contributes.
    `after`: jobs that have to be done first. `unfit`: it is held because the mesh is too small.
    `array`, `array_limit`: of jobs with the same name of an array that many run at a time (0: no limit).
    `apart`, `beside`: jobs on whose nodes it must not, or must, run.
    `notice_s`: how long before a park it is told. A replica of preparation is one unit at a time, in a lane.
    `shared`: whose shares, quota and use count if its tenant has none of its own: those of a tenant of many.
    `preference`: its position in an order that was suggested, which counts within its class.
    """

    job: str
    work: WorkKind = WorkKind.TRAINING
    submitted_at: float
    tenant: str = ""
    shared: str = ""
    priority: int = 0
    replicas: Replicas = ONE
    replica_slots: int = 1
    other_slots: int = 0
    needs: SlotNeeds = ANY_SLOT
    growth: float = GROWTH
    speeds: tuple[float, ...] = ()
    deadline: float | None = None
    after: tuple[str, ...] = ()
    held: str = ""
    unfit: bool = False
    wall_time_s: float | None = None
    array: str = ""
    array_limit: int = 0
    apart: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    notice_s: float = 0.0
    preference: int = NO_PREFERENCE
    account: str = field(init=False, default="")
    """Whose shares and use count: the tenant's; of lanes, which are another resource, one beside that."""
    conditional: bool = field(init=False, default=False)
    """Whether more than room may keep it from starting; a fast answer for most jobs."""
    local: bool = field(init=False, default=False)
    """Whether nodes matter to it, and not only pools."""
    elastic: bool = field(init=False, default=False)
    """Whether it may have more or fewer replicas."""
    least_slots: int = field(init=False, default=1)
    """The slots that it takes with its minimum of replicas."""
    turn: tuple[int, float, str] = field(init=False, default=(NO_PREFERENCE, 0.0, ""))
    """Among equals: suggested before others, submitted before others, id."""

    def __post_init__(self) -> None:
        training = self.work is WorkKind.TRAINING
        account = (self.shared or self.tenant) if training else lanes_of(self.tenant)
        object.__setattr__(self, "account", account)
        object.__setattr__(self, "conditional", bool(self.held or self.after or self.array_limit))
        object.__setattr__(self, "local", bool(self.apart or self.beside))
        object.__setattr__(self, "elastic", self.replicas.least < self.replicas.most)
        object.__setattr__(self, "least_slots", self.slots(self.replicas.least))
        object.__setattr__(self, "turn", (self.preference, self.submitted_at, self.job))

    def slots(self, replicas: int) -> int:
        """The slots that it takes with so many replicas."""
        return replicas * self.replica_slots + self.other_slots

    def speed(self, replicas: int) -> float:
        """Its speed with so many replicas; 1 with `want`."""
        if self.speeds:
            return self.speeds[min(max(0, replicas - self.replicas.least), len(self.speeds) - 1)]
        want = self.replicas.want
        if replicas <= want:
            return replicas / want
        return 1.0 + self.growth * (replicas - want) / want

    def gain(self, replicas: int, larger: int) -> float:
        """The share of a step's time that each replica would save, had it `larger` instead of `replicas`."""
        return (1.0 - self.speed(replicas) / self.speed(larger)) / (larger - replicas)

    def larger(self, replicas: int, least_gain: float) -> int | None:
        """The next number of replicas worth its slots: up to `want` any that helps, beyond it by its gain.

        With four microbatches three replicas take as long as two; four take half of that.
        """
        want = self.replicas.want
        if replicas < want and self.speeds:
            present = self.speed(replicas)
            return next((count for count in range(replicas + 1, want) if self.speed(count) > present), want)
        if replicas < want:
            return replicas + 1
        if (
            self.work is WorkKind.PREPARATION
        ):  # lanes beyond `want` cost nobody anything, nor does their return
            return replicas + 1 if replicas < self.replicas.most else None
        if not self.speeds:
            worth = replicas < self.replicas.most and self.gain(replicas, replicas + 1) >= least_gain
            return replicas + 1 if worth else None
        counts = range(replicas + 1, self.replicas.most + 1)
        return next((count for count in counts if self.gain(replicas, count) >= least_gain), None)

    def no_faster(self, replicas: int) -> int:
        """The fewest replicas that are as fast as so many."""
        if not self.speeds:
            return replicas
        counts = range(min(replicas, self.replicas.least), replicas)
        return next((count for count in counts if self.speed(count) >= self.speed(replicas)), replicas)


def lanes_of(tenant: str) -> str:
    """The account of a tenant's lanes."""
    return f"lanes of {tenant}"


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """A job that waits. `work_s`: predicted seconds that are left with `want` replicas; None: unknown.

    `since`: when it began to wait; `attained_slot_s`: slots times seconds that it has had. `parked`: it has
    begun, and waits at a checkpoint.
    """

    request: JobRequest
    since: float
    work_s: float | None = None
    attained_slot_s: float = 0.0
    ran_s: float = 0.0
    parked: bool = False
    shortest_s: float = field(init=False, default=math.inf)
    """How long it would run with `want` replicas; infinity if nobody knows."""

    def __post_init__(self) -> None:
        limit, work_s = self.request.wall_time_s, self.work_s
        left_s = math.inf if limit is None else max(0.0, limit - self.ran_s)
        object.__setattr__(self, "shortest_s", left_s if work_s is None or left_s < work_s else work_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActiveJob:
    """A job that holds slots.

    `slots`: ids of those that it holds, until the exit from them is seen; `leaving`: those among them that it
    was told to leave, free at about `leaves_at`. `replicas`: those that it has, or is told to have.
    `parks_at`: when it will park, once that is decided. `over_time`: it will because its own wall time ends
    then, and nobody counts on its slots before. `started_at`: of this run. `parked_at`, `resized_at`: the
    last time that it parked, and changed its size. `step_s`: of one step. `fixed`: it can be told nothing
    now, since it is starting, ending, or being brought back.
    """

    request: JobRequest
    replicas: int
    slots: tuple[str, ...]
    started_at: float
    work_s: float | None = None
    attained_slot_s: float = 0.0
    ran_s: float = 0.0
    leaving: frozenset[str] = frozenset()
    leaves_at: float = 0.0
    parks_at: float | None = None
    over_time: bool = False
    parked_at: float = -math.inf
    resized_at: float = -math.inf
    step_s: float = 0.0
    fixed: bool = False

    @property
    def parking(self) -> bool:
        """Whether it is decided that it parks."""
        return self.parks_at is not None

    @property
    def gives_up(self) -> bool:
        """Whether its slots are others' already, as far as shares and promises go: it parks for somebody."""
        return self.parks_at is not None and not self.over_time

    def ends_at(self, now: float) -> float:
        """When its slots are predicted to be free; infinity if nobody knows."""
        if self.parks_at is not None and not self.over_time:
            return max(now, self.parks_at, self.leaves_at)
        limit = self.request.wall_time_s
        left_s = math.inf if limit is None else max(0.0, limit - self.ran_s)
        if self.work_s is not None:
            left_s = min(left_s, self.work_s / self.request.speed(self.replicas))
        return now + left_s


def predicted_s(job: QueuedJob, replicas: int) -> float:
    """How long a waiting job would run with so many replicas; infinity if nobody knows."""
    limit = job.request.wall_time_s
    left_s = math.inf if limit is None else max(0.0, limit - job.ran_s)
    if job.work_s is not None:
        left_s = min(left_s, job.work_s / job.request.speed(replicas))
    return left_s
