"""What the queue sees of a job's run, and has it do: take slots, change its size, give way (ADR-0073)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from bus.logs import get_logger
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.queue.mesh_slots import (
    as_needed,
    counts_use,
    in_replica_order,
    job_request,
    last_step_s,
    ran_s,
    replicas_of,
    up_to,
    with_preference,
    work_left_s,
)
from entities.queue.growth import (
    GrowthLimit,
    growth_forecast,
    growth_limit,
    mean_labels,
    use_of_a_slot,
)
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob
from schemas.automation import Automation, BudgetSpec, lower
from schemas.changes import Forecast, JobObjective
from schemas.errors import DmscError
from schemas.job import JobRecord
from schemas.job_file.parallel import ReplicaRange
from schemas.task_graph import Placement, TaskGraph

log = get_logger("orchestrator")


class TrainingSize(Protocol):
    """A job's training, as far as its size goes."""

    @property
    def step(self) -> int:
        """The step that is open."""

    @property
    def finds_room(self) -> bool:
        """Whether an instance that it lost is placed in a moment."""

    def scale(self, stages: Sequence[int], replicas: int) -> str:
        """Has these stages have so many replicas; returns what will happen, in words."""


class GivesWay(Protocol):
    """What parks a job."""

    @property
    def can_give_way(self) -> bool:
        """Whether it could park now."""

    def give_way(self, why: str, *, held: bool) -> bool:
        """Has it park for another job, or for good (`held`); False: it can't now."""


class SlotHolding:
    """One run's place in the queue, or its slots.

    Args:
        waiting: what it asks for; None while it has instances, or is held back for another reason than room.
        placed_at: when it got its slots.
        leaving: units that were told to leave and have not been seen to exit.
        over: whether it is certain how the job ends.
    """

    def __init__(
        self,
        job: JobContext,
        training: TrainingSize,
        parking: GivesWay,
        *,
        waiting: Callable[[], QueuedJob | None],
        placed_at: Callable[[], float],
        leaving: Callable[[], frozenset[str]],
        over: Callable[[], bool],
    ) -> None:
        self._job = job
        self._training = training
        self._parking = parking
        self._waiting = waiting
        self._placed_at = placed_at
        self._leaving = leaving
        self._over = over
        self._resized_at: float | None = None
        self._leaves_at = 0.0
        self._named_limits: set[tuple[int, JobObjective | None, BudgetSpec | None]] = set()
        self._preferred: int | None = None  # replicas, by a suggestion that was adopted
        self.on_growth: Callable[[int, int, TaskGraph], None] = lambda before, after, graph: None
        """Called when the queue has it grow: replicas before and after, and the graph before."""
        self.too_soon: Callable[[], str] = lambda: ""
        """Why it does not grow now: what an earlier change brought is not known yet."""
        self._ordered: tuple[TaskGraph | None, Sequence[Placement]] = None, ()

    @property
    def name(self) -> str:
        """The job's id."""
        return self._job.name

    @property
    def record(self) -> JobRecord:
        """The job's record, with its user and what it has used."""
        return self._job.store.record

    @property
    def held(self) -> str:
        """Why it waits for a person; empty: it does not."""
        return self._job.store.record.held

    @property
    def holds(self) -> bool:
        """Whether it has slots."""
        return bool(self.placements)

    @property
    def placements(self) -> Sequence[Placement]:
        """Where its units run, or are to run; those last that leave first when it shrinks."""
        graph = self._job.instances.deployed
        if graph is not self._ordered[0]:
            self._ordered = graph, () if graph is None else in_replica_order(graph)
        return self._ordered[1]

    @property
    def leaving(self) -> Collection[str]:
        """The units among them that were told to leave."""
        return self._leaving()

    @property
    def finds_room(self) -> bool:
        return self._training.finds_room

    @property
    def waiting(self) -> QueuedJob | None:
        return None if self._over() else self._waiting()

    @property
    def active(self) -> ActiveJob:
        """What the queue has to know of it while it holds slots, but for these."""
        record, spec, now = self._job.store.record, self._job.spec, time.time()
        over, graph, placed_at = self._over(), self._job.instances.deployed, self._placed_at()
        request = self._request()
        if self._preferred is not None and graph is not None:
            request = with_preference(request, self._preferred)
        staying = self._staying
        return ActiveJob(
            request=request,
            replicas=request.replicas.want if staying is None else staying,
            slots=(),
            started_at=placed_at,
            work_s=0.0 if over else work_left_s(record, spec, self._training.step, request),
            attained_slot_s=record.usage.held(record.usage.slots, now).slot_s,
            ran_s=0.0 if over else ran_s(record, now),
            leaves_at=self._leaves_at,
            resized_at=self._sized_at(),
            fixed=not self._parking.can_give_way,
        )

    def _request(self) -> JobRequest:
        """What the job may have in all, by its range, its objective and its budget."""
        record, spec = self._job.store.record, self._job.spec
        if (within := self._load_range) is not None and self._preferred is not None:
            return as_needed(job_request(record, spec), within, self._preferred)
        limit = self.growth_limit
        if limit is None:
            return job_request(record, spec)
        return up_to(job_request(record, spec, whole_range=True), limit.replicas)

    @property
    def _load_range(self) -> ReplicaRange | None:
        """Within which the load of a version of a service decides; None: it does not."""
        spec = self._job.spec
        return None if spec.serve is None else spec.parallel.replica_range

    @property
    def growth_limit(self) -> GrowthLimit | None:
        """The most replicas by the job's objective and budget; None: these don't limit it."""
        record, spec, staying = self._job.store.record, self._job.spec, self._staying
        if staying is None or self._load_range is not None or not counts_use(record):
            return None
        request = job_request(record, spec, whole_range=True)
        slots = self._job.mesh.slots_of(self.placements)
        return growth_limit(record, request, staying, last_step_s(record, spec), self._training.step, slots)

    def grown(self, before: int, after: int, step_s: float) -> Forecast:
        """The forecast of growth from so many replicas, with which a step takes `step_s`, to others."""
        record, spec = self._job.store.record, self._job.spec
        uses = use_of_a_slot(record.usage, mean_labels(self._job.mesh.slots_of(self.placements)))
        request = job_request(record, spec, whole_range=True)
        left = max(0, record.last_step - self._training.step)
        return growth_forecast(request, before, after, step_s, left, uses)

    def tell_limit(self) -> None:
        """Says in the job's events where its growth ends by its objective or budget, once for each limit."""
        limit, record = self.growth_limit, self._job.store.record
        if limit is None or not limit.why:
            return
        end = (limit.replicas, record.objective, record.budget)
        if end not in self._named_limits:  # by steps of changing length, the same few may come in turn
            self._named_limits.add(end)
            self._job.events.changed(f"grows to no more than {limit.replicas} replicas: {limit.why}")

    def _sized_at(self) -> float:
        """When its size last changed. A job that is changed without a person grows as soon as slots join."""
        if self._load_range is not None:  # whoever reads its load sees to it that it does not swing
            return -math.inf
        if self._resized_at is not None:
            return self._resized_at
        return -math.inf if self.automation is Automation.ACT else self._placed_at()

    @property
    def automation(self) -> Automation:
        """How far it is changed without a person."""
        return lower(self._job.mesh.automation, self._job.store.record.automated)

    @property
    def _staying(self) -> int | None:
        """Its replicas that are not leaving; None: nothing is placed, or their number is fixed."""
        graph = self._job.instances.deployed
        if graph is None or self._job.spec.parallel.replica_range is None:
            return None
        return replicas_of(graph) - self._going(graph)

    def _going(self, graph: TaskGraph) -> int:
        """How many replicas are leaving."""
        leaving = self._leaving()
        stages = {unit.stage for unit in graph.units if unit.sid in leaving}
        return max((sum(unit.sid in leaving for unit in graph.stage(stage)) for stage in stages), default=0)

    def give_way(self, why: str, *, held: bool) -> bool:
        """Has it park for another job, or for good (`held`); returns False if it can't be parked now."""
        return not self._over() and self._parking.give_way(why, held=held)

    def notify(self, text: str) -> None:
        """Tells the job, in its record and its events, what becomes of its slots."""
        if not self._over() and self._job.instances.deployed is not None:  # else it holds none any more
            self._job.events.changed(text, reason=text)

    @property
    def preferred(self) -> int | None:
        """What `prefer` was told last."""
        return self._preferred

    def prefer(self, replicas: int | None) -> None:
        """From now on the queue gives it no more replicas than these; None: what the job file says."""
        self._preferred = replicas
        self._job.queue.again()

    async def prioritise(self, priority: int, by: str) -> None:
        """A person gives it another class, which its record keeps; the next decision ranks all anew."""
        store, before = self._job.store, self._job.store.record.priority_in_force
        await store.note(now=True, priority=priority)
        self._job.queue.again()
        if before != priority:
            await store.tell("policy", text=f"priority: {before} → {priority} by {by}")

    @property
    def replicas(self) -> int:
        """Those that it has, or is told to have."""
        staying = self._staying
        return self.active.replicas if staying is None else staying

    def resize(self, replicas: int, why: str) -> bool:
        """For the queue: has it take or leave slots, to so many replicas; returns False if that can't be now.

        Growth is judged by measured steps like any change, and given up if it brings nothing.
        """
        before, graph = self.replicas, self._job.instances.deployed
        grows = replicas > before
        if grows and (obstacle := self.too_soon()):  # the queue decides again once that is over
            log.info("not resized now", job=self._job.name, replicas=replicas, reason=obstacle)
            return False
        if not self.change_size(replicas, why):
            return False
        if grows and graph is not None:
            self.on_growth(before, replicas, graph)
        return True

    def change_size(self, replicas: int, why: str) -> bool:
        """Has it take or leave slots, to so many replicas; returns False if that can't be now."""
        job = self._job
        if self._over() or not self._parking.can_give_way:
            return False
        try:
            said = self._training.scale(range(job.spec.parallel.stages), replicas)
        except DmscError as error:
            log.info("not resized now", job=job.name, replicas=replicas, reason=error.text)
            return False
        now = time.time()
        self._resized_at, self._leaves_at = now, now + job.queue.rules.shrink_s
        log.info("resized", job=job.name, replicas=replicas, reason=why)
        job.events.changed(f"{why}: {said}")
        return True
