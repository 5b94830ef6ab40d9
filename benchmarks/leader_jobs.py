"""Waiting jobs as the leading orchestrator has them: records on a real bus, plans, places in its queue.

Only what would follow is left out: once it has its slots, a job computes nothing, and no instance starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from benchmarks.harness.meshes import new_folder
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from entities.orchestrator.job.bus_outages import BusOutages
from entities.orchestrator.job.deployment import Deployment
from entities.orchestrator.job_state.context import JobTimes
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.membership.slot_holding import SlotHolding
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.queue.job_queue import JobQueue
from entities.orchestrator.queue.mesh_slots import queue_rules
from entities.orchestrator.queue.slot_holder import SlotHolder
from entities.planner.planning_process import PlanningConfig
from schemas.cluster import NodeStatus, Slot
from schemas.envelope import EntityKind
from schemas.job import JobRecord, JobSpec, JobState
from schemas.task_graph import LayerProfile, ModelTopology


class LeaderJob:
    """One job of the term, from its place in the queue until it has its slots.

    Args:
        bus: where its record is.
        mesh: the nodes.
        queue: of the term.
        record: of the job.
        topology: its analysed model.
    """

    def __init__(
        self, bus: Bus, mesh: MeshView, queue: JobQueue, record: JobRecord, topology: ModelTopology
    ) -> None:
        self._topology = topology
        self.store = JobStore(bus, record)
        self.instances = JobInstances(bus, mesh, record)
        context: Any = SimpleNamespace(
            bus=bus,
            mesh=mesh,
            queue=queue,
            name=record.job,
            spec=record.spec,
            epoch=record.epoch,
            store=self.store,
            instances=self.instances,
            gateway=SimpleNamespace(choose=_nothing),
            events=SimpleNamespace(changed=lambda *told, **more: None),
            times=JobTimes(),
            planning=PlanningConfig(),
        )
        self.instances.start = _nothing  # type: ignore[method-assign, assignment]
        self.deployment = Deployment(context, BusOutages(record.job, self.store.reason), waits=True)
        self.parks = False
        size: Any = SimpleNamespace(step=0, finds_room=False, scale=lambda stages, replicas: "")
        self.holding = SlotHolding(
            context,
            size,
            self,
            waiting=lambda: self.deployment.waiting,
            placed_at=lambda: self.deployment.placed_at,
            leaving=frozenset,
            over=lambda: False,
        )

    @property
    def can_give_way(self) -> bool:
        return True

    def give_way(self, why: str, *, held: bool) -> bool:
        """It is asked to park: whoever drives it does the rest."""
        self.parks = True
        return True

    async def deploy(self) -> None:
        """Waits for its slots, and takes them."""
        await self.deployment.deploy(self._topology)


async def _nothing(*told: object, **more: object) -> None:
    return None


class LeaderTerm:
    """A leader's queue and its jobs.

    Args:
        bus: on which streams and buckets have been provisioned.
        mesh: the nodes.
        order: of the queue.
    """

    def __init__(self, bus: Bus, mesh: MeshView, order: str) -> None:
        self.bus = bus
        self.mesh = mesh
        self.jobs: dict[str, LeaderJob] = {}
        self._holders: dict[str, SlotHolder] = {}
        self._ended: dict[str, JobRecord] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.queue = JobQueue(mesh, self._holders, self._ended, queue_rules(order))

    def submit(self, records: Iterable[JobRecord], topology: ModelTopology) -> None:
        """Has jobs enter the queue."""
        for record in records:
            job = self.jobs[record.job] = LeaderJob(self.bus, self.mesh, self.queue, record, topology)
            self._holders[record.job] = job.holding
            self._tasks[record.job] = asyncio.create_task(job.deploy())

    async def end(self, job: str) -> None:
        """A job is done: its slots are free."""
        del self._holders[job]
        ended = self.jobs.pop(job)
        task = self._tasks.pop(job)
        task.cancel()
        self._ended[job] = ended.store.record
        self.queue.job_ended(ended.store.record)
        await self.mesh.nudge()

    @property
    def records(self) -> Mapping[str, JobRecord]:
        """Of all jobs."""
        return {name: job.store.record for name, job in self.jobs.items()}

    @property
    def working(self) -> list[str]:
        """The jobs that have slots."""
        return [name for name, job in self.jobs.items() if job.instances.deployed is not None]

    @contextlib.asynccontextmanager
    async def deciding(self) -> AsyncIterator[None]:
        """The queue decides meanwhile; afterwards all jobs are dropped."""
        deciding = asyncio.create_task(self.queue.run())
        try:
            yield
        finally:
            tasks = [deciding, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended


async def wide_mesh(nodes: int, slots: int, clusters: int = 4) -> MeshView:
    """Nodes that have joined, with free slots of equal speed."""
    mesh = MeshView()
    for number in range(nodes):
        cluster = f"cluster-{number % clusters}"
        mesh.nodes[f"agent-{number:05}"] = NodeStatus(
            sid=f"agent-{number:05}",
            cluster=cluster,
            node=f"node-{number:05}",
            incarnation="i",
            slots=tuple(Slot(index=index, device="cpu", memory_bytes=8 << 30) for index in range(slots)),
            address="127.0.0.1",
            warm=True,
        )
    await mesh.nudge()
    return mesh


def chain_of_layers(count: int) -> ModelTopology:
    """An analysed model of equal layers in blocks of ten: `blocks.0.0`, `blocks.0.1`, …"""
    layers = tuple(
        LayerProfile(
            index=at,
            name=f"blocks.{at // 10}.{at % 10}",
            kind="Linear",
            parameters=10_000,
            parameter_bytes=40_000,
            forward_ms=1.0,
            backward_ms=2.0,
            activation_bytes=10_000,
            output=(),
            output_bytes=1_000,
        )
        for at in range(count)
    )
    return ModelTopology(
        job="j",
        cluster="cluster-0",
        node="node-00000",
        layers=layers,
        parameters=10_000 * count,
        input_bytes=512,
        data_tokens=10_000,
        code_digest="d",
    )


def queued_record(job: str, spec: JobSpec, user: str = "") -> JobRecord:
    """Of a job that was submitted just now."""
    now = time.time()
    return JobRecord(
        job=job, spec=spec, state=JobState.QUEUED, user=user, submitted_at=now, changed_at=now, epoch=1
    )


@contextlib.asynccontextmanager
async def leader_term(mesh: MeshView, order: str) -> AsyncIterator[LeaderTerm]:
    """A term on a server of its own, whose queue decides."""
    with new_folder() as folder:
        async with (
            EmbeddedServer(folder, sync_always=False) as server,
            Bus.connect(server.url, name="smo-1", kind=EntityKind.ORCHESTRATOR) as bus,
        ):
            await bus.provision()
            term = LeaderTerm(bus, mesh, order)
            async with term.deciding():
                yield term
