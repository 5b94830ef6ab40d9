"""The queue in virtual time: jobs arrive, are decided about, compute, leave their slots.

The simulation of a trace, the expected start of a waiting job, and the property tests run this with the same
`decide` as the orchestrator. Slots are free when their exit is seen, not when it is decided.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from entities.queue.decision import Admission, ParkOrder, QueueDecision, Resize
from entities.queue.queue_rules import QueueOrder
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob
from entities.queue.scheduling import QueueSurroundings, decide
from entities.queue.tenant_shares import DecayedUse


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceJob:
    """A job to be simulated: it arrives at `request.submitted_at` and needs `work_s` with `want` replicas.

    `estimate`: what the queue believes of `work_s`, as a factor. `attained_slot_s`: what it has had before.
    """

    request: JobRequest
    work_s: float
    estimate: float = 1.0
    attained_slot_s: float = 0.0


@dataclass(slots=True)
class JobCourse:
    """What became of one job. Times in seconds; `waited_s`: without slots, in all."""

    job: TraceJob
    first_start_at: float | None = None
    ended_at: float | None = None
    waited_s: float = 0.0
    parks: int = 0
    resizes: int = 0

    @property
    def completion_s(self) -> float:
        """From its submission to its end."""
        assert self.ended_at is not None
        return self.ended_at - self.job.request.submitted_at


@dataclass(frozen=True, kw_only=True, slots=True)
class TransitionTimes:
    """What a change costs a job, in seconds. `start_s`: of coming back from a checkpoint."""

    shrink_s: float = 5.0
    grow_s: float = 5.0
    park_s: float = 15.0
    start_s: float = 15.0


class _Happening(StrEnum):
    ARRIVES = "arrives"
    ENDS = "ends"
    EXITED = "exited"
    PARKED = "parked"
    LOOK = "look"


@dataclass(slots=True)
class _VirtualRun:
    """A job with slots. `computes_from`: when it computes again after a change."""

    course: JobCourse
    replicas: int
    slots: tuple[str, ...]
    started_at: float
    left_s: float
    attained_slot_s: float
    ran_s: float
    computes_from: float
    at: float
    leaving: frozenset[str] = frozenset()
    leaves_at: float = 0.0
    parks_at: float | None = None
    held: bool = False
    exits: bool = False
    parked_at: float = -math.inf
    resized_at: float = -math.inf
    version: int = 0


@dataclass(slots=True)
class _VirtualWait:
    """A job without slots."""

    course: JobCourse
    since: float
    left_s: float
    attained_slot_s: float
    ran_s: float = 0.0
    parked_at: float = -math.inf
    held: bool = False


@dataclass(kw_only=True)
class VirtualQueue:
    """Runs jobs through the queue's decisions.

    Args:
        around: slots and rules; what has been done and used is kept here.
        times: what changes cost.
        watch: called after each decision that changes something, with the time and the decision.
    """

    around: QueueSurroundings
    times: TransitionTimes = TransitionTimes()
    watch: Callable[[float, QueueDecision], None] = lambda now, decision: None
    now: float = 0.0
    decisions: int = 0
    looked: int = 0
    """At how many jobs all decisions have looked."""
    courses: dict[str, JobCourse] = field(default_factory=dict)
    busy_slot_s: float = 0.0

    def __post_init__(self) -> None:
        self._waits: dict[str, _VirtualWait] = {}
        self._runs: dict[str, _VirtualRun] = {}
        self._events: list[tuple[float, int, _Happening, str, int]] = []
        self._number = 0
        self._versions = 0
        self._counts_use = self.around.rules.order is QueueOrder.FAIR
        self._used = self._used_before()
        self._done: dict[str, bool] = dict(self.around.done)
        self._looks_at = math.inf

    def _used_before(self) -> DecayedUse:
        before = DecayedUse(self.around.rules.half_life_s)
        for tenant, used in self.around.used_slot_s.items():
            before.add(tenant, used, 0.0, self.now)
        return before

    # --- from outside ---------------------------------------------------------------------------------------
    def submit(self, jobs: Iterable[TraceJob]) -> None:
        """Has jobs arrive at their times."""
        for job in jobs:
            self.courses[job.request.job] = JobCourse(job)
            self._at(max(self.now, job.request.submitted_at), _Happening.ARRIVES, job.request.job)

    def adopt(self, queue: Iterable[QueuedJob], running: Iterable[ActiveJob], now: float) -> None:
        """Begins in the middle: with these jobs waiting and running. Unknown work counts as endless."""
        self.now = now
        self._used = self._used_before()
        for waiting in queue:
            work_s = math.inf if waiting.work_s is None else waiting.work_s
            course = JobCourse(TraceJob(request=waiting.request, work_s=work_s))
            self.courses[waiting.request.job] = course
            self._waits[waiting.request.job] = _VirtualWait(
                course, waiting.since, work_s, waiting.attained_slot_s, waiting.ran_s
            )
        for job in running:
            work_s = math.inf if job.work_s is None else job.work_s
            course = JobCourse(TraceJob(request=job.request, work_s=work_s), first_start_at=job.started_at)
            self.courses[job.request.job] = course
            run = self._runs[job.request.job] = _VirtualRun(
                course,
                job.replicas,
                job.slots,
                job.started_at,
                work_s,
                job.attained_slot_s,
                job.ran_s,
                computes_from=now,
                at=now,
                leaving=job.leaving,
                leaves_at=job.leaves_at,
                parks_at=job.parks_at,
                held=job.over_time,
                parked_at=job.parked_at,
                resized_at=job.resized_at,
            )
            if run.leaving:
                self._at(max(now, run.leaves_at), _Happening.EXITED, job.request.job, run.version)
            if run.parks_at is not None:
                self._at(max(now, run.parks_at), _Happening.PARKED, job.request.job)
            self._plan_end(job.request.job, run)
        self._at(now, _Happening.LOOK, "")

    def hold(self, job: str, held: bool) -> None:
        """Holds a waiting job, or lets it go, as a person would."""
        if job in self._waits:
            self._waits[job].held = held
            self._at(self.now, _Happening.LOOK, "")

    def change_request(self, job: str, **asked: Any) -> None:
        """A job asks for something else from now on, a person has set its priority, say."""
        course = self.courses[job]
        course.job = replace(course.job, request=replace(course.job.request, **asked))
        self._at(self.now, _Happening.LOOK, "")

    def park(self, job: str) -> None:
        """Has a running job park until it is let go, as a person would."""
        run = self._runs[job]
        if not run.exits:
            self._order_park(ParkOrder(job=job, at=self.now, reason="parked by a person", held=True))
            self._at(self.now, _Happening.LOOK, "")

    def change_mesh(self, around: QueueSurroundings) -> None:
        """Slots, reservations or quotas are others from now on.

        Jobs that hold slots which are gone wait again, with the work that they had left.
        """
        self.around = around
        there = around.table.index
        for job, run in list(self._runs.items()):
            run.leaving = frozenset(slot for slot in run.leaving if slot in there)
            run.slots = tuple(slot for slot in run.slots if slot in there or slot in run.leaving)
            if len(run.slots) - len(run.leaving) < run.course.job.request.slots(run.replicas):
                self._advance(run)
                del self._runs[job]
                self._waits[job] = self._waits_again(run)
        self._at(self.now, _Happening.LOOK, "")

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Runs until nothing happens any more, or until `until` says so."""
        while self._events and not until():
            self.step()

    def step(self) -> None:
        """All events of the next moment, then one decision."""
        at = self._events[0][0]
        if math.isinf(at):
            self._events.clear()
            return
        self.busy_slot_s += (at - self.now) * sum(len(run.slots) for run in self._runs.values())
        self.now = at
        happened = False
        while self._events and self._events[0][0] <= at:
            _, _, event, job, version = heapq.heappop(self._events)
            happened |= self._happens(event, job, version)
        if happened:
            self._decide()

    @property
    def pending(self) -> bool:
        """Whether anything is still to happen."""
        return bool(self._events)

    @property
    def waiting(self) -> Sequence[str]:
        """The jobs without slots."""
        return list(self._waits)

    @property
    def holders(self) -> dict[str, tuple[str, ...]]:
        """Which slots each job holds, those that it leaves included."""
        return {name: run.slots for name, run in self._runs.items()}

    def replicas_of(self, job: str) -> int:
        """How many replicas a running job has, or is told to have."""
        return self._runs[job].replicas

    # --- events ---------------------------------------------------------------------------------------------
    def _at(self, at: float, event: _Happening, job: str, version: int = 0) -> None:
        self._number += 1
        heapq.heappush(self._events, (at, self._number, event, job, version))

    def _happens(self, event: _Happening, job: str, version: int) -> bool:
        """Takes an event into the state; returns whether it is still of interest."""
        if event is _Happening.LOOK:
            self._looks_at = math.inf
            return True
        if event is _Happening.ARRIVES:
            course = self.courses[job]
            self._waits[job] = _VirtualWait(course, self.now, course.job.work_s, course.job.attained_slot_s)
            return True
        run = self._runs.get(job)
        if run is None:
            return False
        if event is _Happening.ENDS and version == run.version:
            self._advance(run)
            self._ended(job, run)
            return True
        if event is _Happening.EXITED and run.leaving and self.now >= run.leaves_at:
            run.slots = tuple(slot for slot in run.slots if slot not in run.leaving)
            run.leaving = frozenset()
            return True
        if event is _Happening.PARKED and run.parks_at is not None and self.now >= run.parks_at:
            return self._parks(job, run)
        return False

    def _parks(self, job: str, run: _VirtualRun) -> bool:
        """A job leaves: first it writes its checkpoint, then its slots are seen free."""
        self._advance(run)
        if not run.exits:
            run.exits = True
            run.version = 0  # it computes no more
            run.computes_from = math.inf
            run.parks_at = self.now + self.times.park_s
            self._at(run.parks_at, _Happening.PARKED, job)
            return False
        del self._runs[job]
        run.course.parks += 1
        self._waits[job] = self._waits_again(run)
        return True

    def _waits_again(self, run: _VirtualRun) -> _VirtualWait:
        return _VirtualWait(
            run.course, self.now, run.left_s, run.attained_slot_s, run.ran_s, self.now, run.held
        )

    def _ended(self, job: str, run: _VirtualRun) -> None:
        del self._runs[job]
        run.course.ended_at = self.now
        self._done[job] = True

    def _advance(self, run: _VirtualRun) -> None:
        """Brings a run's work, its service, and what its tenant has used up to now."""
        computed_s = max(0.0, self.now - max(run.at, run.computes_from))
        request = run.course.job.request
        run.left_s = max(0.0, run.left_s - computed_s * request.speed(run.replicas))
        slot_s = (self.now - run.at) * len(run.slots)
        run.attained_slot_s += slot_s
        if self._counts_use and slot_s:
            self._used.add(request.account, slot_s, self.now - run.at, self.now)
        run.ran_s += self.now - run.at
        run.at = self.now

    def _plan_end(self, job: str, run: _VirtualRun) -> None:
        self._versions += 1  # of all runs: what was planned for a former run of the job is not for this one
        run.version = self._versions
        speed = run.course.job.request.speed(run.replicas)
        self._at(max(self.now, run.computes_from) + run.left_s / speed, _Happening.ENDS, job, run.version)

    # --- decisions ------------------------------------------------------------------------------------------
    def _decide(self) -> None:
        self.decisions += 1
        queue, running = self.snapshot()
        self.looked += len(queue) + len(running)
        around = replace(self.around, used_slot_s=self._used.at(self.now), done=self._done)
        decision = decide(queue, running, around, self.now)
        for admission in decision.admissions:
            self._start(admission)
        for resize in decision.resizes:
            self._resize(resize)
        for park in decision.parks:
            self._order_park(park)
        if decision.next_at is not None and self.now < decision.next_at < self._looks_at:
            self._looks_at = decision.next_at
            self._at(decision.next_at, _Happening.LOOK, "")
        if decision.changes:
            self.watch(self.now, decision)

    def snapshot(self) -> tuple[list[QueuedJob], list[ActiveJob]]:
        """The waiting and the running jobs, as `decide` gets them."""
        queue = [
            QueuedJob(
                request=wait.course.job.request
                if not wait.held
                else replace(wait.course.job.request, held="held"),
                since=wait.since,
                work_s=self._believed(wait.course, wait.left_s),
                attained_slot_s=wait.attained_slot_s,
                ran_s=wait.ran_s,
                parked=wait.course.parks > 0,
            )
            for wait in self._waits.values()
        ]
        running = []
        for run in self._runs.values():
            self._advance(run)
            running.append(
                ActiveJob(
                    request=run.course.job.request,
                    replicas=run.replicas,
                    slots=run.slots,
                    started_at=run.started_at,
                    work_s=self._believed(run.course, run.left_s),
                    attained_slot_s=run.attained_slot_s,
                    ran_s=run.ran_s,
                    leaving=run.leaving,
                    leaves_at=run.leaves_at,
                    parks_at=run.parks_at,
                    over_time=run.held and not run.exits,
                    parked_at=run.parked_at,
                    resized_at=run.resized_at,
                )
            )
        return queue, running

    def _believed(self, course: JobCourse, left_s: float) -> float | None:
        return None if math.isinf(left_s) else left_s * course.job.estimate

    def _start(self, admission: Admission) -> None:
        wait = self._waits.pop(admission.job)
        course = wait.course
        course.waited_s += self.now - wait.since
        if course.first_start_at is None:
            course.first_start_at = self.now
        pause_s = self.times.start_s if course.parks else 0.0
        run = self._runs[admission.job] = _VirtualRun(
            course,
            admission.replicas,
            admission.slots,
            self.now,
            wait.left_s,
            wait.attained_slot_s,
            wait.ran_s,
            computes_from=self.now + pause_s,
            at=self.now,
            parked_at=wait.parked_at,
        )
        self._plan_end(admission.job, run)

    def _resize(self, resize: Resize) -> None:
        run = self._runs[resize.job]
        run.course.resizes += 1
        run.resized_at = self.now
        run.replicas = resize.replicas
        run.slots = (*run.slots, *resize.takes)
        pause_s = self.times.grow_s
        if resize.leaves:
            pause_s = self.times.shrink_s
            run.leaving = frozenset(resize.leaves)
            run.leaves_at = self.now + pause_s
            self._at(run.leaves_at, _Happening.EXITED, resize.job)
        run.computes_from = max(run.computes_from, self.now + pause_s)
        self._plan_end(resize.job, run)

    def _order_park(self, park: ParkOrder) -> None:
        run = self._runs[park.job]
        run.parks_at = max(self.now, park.at)
        run.held = park.held
        if not run.leaving:
            run.leaves_at = run.parks_at + self.times.park_s
        self._at(run.parks_at, _Happening.PARKED, park.job)
