"""Jobs in the orchestrator's queue, as far as it looks at them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.queue.job_queue import JobQueue, SlotGrant
from entities.orchestrator.queue.job_trials import AsksTrial
from entities.orchestrator.queue.mesh_slots import queue_rules
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob
from schemas.errors import BadInput
from schemas.job import JobState
from schemas.task_graph import Placement
from tests.builders.graphs import placement
from tests.builders.jobs import job as job_record
from tests.waiting import eventually


class Run:
    """A job's run, as far as the queue looks at it."""

    def __init__(self, name: str, slots: int, at: float, *, work_s: float | None = None) -> None:
        self.name, self.work_s = name, work_s
        self.request = JobRequest(job=name, submitted_at=at, replica_slots=slots)
        self.placements: list[Placement] = []
        self.finds_room = False
        self.heard: list[Any] = []
        self.fails: Exception | None = None
        self.plans = 0
        self.nodes: frozenset[str] | None = None
        self.gave_way: list[tuple[str, bool]] = []
        self.notices: list[str] = []
        self.record = job_record(name, JobState.QUEUED)
        self.leaving: set[str] = set()
        self.resized: list[tuple[int, str]] = []
        self.replicas = 0
        self.ran_s = self.attained_slot_s = self.since = 0.0
        self.trial: AsksTrial | None = None

    def give_way(self, why: str, *, held: bool) -> bool:
        self.gave_way.append((why, held))
        return True

    def notify(self, text: str) -> None:
        self.notices.append(text)

    @property
    def held(self) -> str:
        return self.record.held

    @property
    def holds(self) -> bool:
        return bool(self.placements)

    @property
    def waiting(self) -> QueuedJob | None:
        if self.placements:
            return None
        return QueuedJob(
            request=self.request,
            since=self.since,
            work_s=self.work_s,
            attained_slot_s=self.attained_slot_s,
        )

    @property
    def active(self) -> ActiveJob:
        replicas = self.replicas or 1
        return ActiveJob(
            request=self.request,
            replicas=replicas,
            slots=(),
            started_at=0.0,
            work_s=self.work_s,
            ran_s=self.ran_s,
            attained_slot_s=self.attained_slot_s,
            fixed=bool(self.record.held),
        )

    def resize(self, replicas: int, why: str) -> bool:
        self.resized.append((replicas, why))
        return True

    async def plan(self, grant: SlotGrant) -> Any:
        """Takes the first slots that are free by its own count."""
        self.plans += 1
        self.nodes, self.replicas = grant.nodes, grant.replicas
        if self.fails is not None:
            raise self.fails
        first = sum(len(run.placements) for run in self.others())
        self.placements = [
            placement(self.name, first + number) for number in range(self.request.slots(grant.replicas))
        ]
        return self.name

    others: Callable[[], list[Run]] = staticmethod(list)


class Over(Run):
    """One that waits for a person once it has parked."""

    @property
    def waiting(self) -> QueuedJob | None:
        return None


@asynccontextmanager
async def queue_of(
    mesh: MeshView,
    *runs: Run,
    order: str = "fcfs",
    there: dict[str, Run] | None = None,
    ended: dict[str, Any] | None = None,
) -> AsyncIterator[JobQueue]:
    """A queue that decides, and these jobs in it. `there` gets them, by name: what leaves it has ended."""
    there = {} if there is None else there
    there.update((run.name, run) for run in runs)
    queue = JobQueue(mesh, there, {} if ended is None else ended, queue_rules(order))

    async def wait(run: Run) -> None:
        run.others = lambda: list(runs)
        with queue.turn(run.name, run.plan) as turn:
            turn.trial = run.trial
            while not run.heard or isinstance(run.heard[-1], NoRoom):
                try:
                    run.heard.append(await turn.news())
                except BadInput as error:
                    run.heard.append(error)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(wait(run)) for run in runs if not run.placements]
        tasks.append(group.create_task(queue.run()))
        yield queue
        for task in tasks:
            task.cancel()


async def heard(run: Run, text: str) -> None:
    async def said() -> bool:
        return any(text in (news.reason if isinstance(news, NoRoom) else str(news)) for news in run.heard)

    await eventually(said, every_s=0.01)


def notice_of(queue: JobQueue, records: dict[str, Any], *, there: bool = True) -> Callable[[], Any]:
    """Whether anybody is to park, or nobody."""

    async def told() -> bool:
        return bool((await queue.status(records, None)).notices) == there

    return told


async def mesh_of(*nodes: Any) -> MeshView:
    mesh = MeshView()
    for each in nodes:
        await mesh.node(each)
    return mesh
