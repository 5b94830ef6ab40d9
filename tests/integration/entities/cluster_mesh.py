"""What the node agent's tests stand on: a small SRD and SMO, an agent in this process, and orders for it."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.subject_row import Subject
from entities.cluster.agent import ClusterAgent
from entities.cluster.config import ClusterConfig
from schemas.base import Message
from schemas.cluster import (
    InstanceStart,
    InstanceStarted,
    InstanceStop,
    Judge,
    Judgement,
    NodeStatus,
)
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, NotFound, Unavailable
from schemas.fault import ClusterReport
from schemas.job import JobSpec
from schemas.job_file.data import DataSpec
from schemas.job_file.model import ModelSpec
from schemas.job_file.training import TrainingSpec
from schemas.registry import InstanceState, StateChange
from schemas.signals import Registration, RegistrationLease
from schemas.task_graph import ComputeRequirements, TaskUnit, UnitKind
from tests.patience import PATIENCE_S

HERE = Path(__file__).parent
STAND_IN_TORCH = HERE.parents[1] / "stand_in_torch"


class Heard:
    """Messages in the order in which a stand-in heard them; a test can wait for one."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._news = asyncio.Condition()

    async def add(self, message: Message) -> None:
        async with self._news:
            self.messages.append(message)
            self._news.notify_all()

    async def first(
        self, kind: type[Any] | tuple[type[Any], ...], matching: Callable[[Any], bool] = lambda _: True
    ) -> Any:
        def find() -> Message | None:
            return next((m for m in self.messages if isinstance(m, kind) and matching(m)), None)

        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: find() is not None)
            return find()

    def all(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


class StandInRegistry:
    """Stands in for the SRD: grants every lease and acknowledges every state of a SID that it knows."""

    def __init__(self, bus: Bus, strict: frozenset[str] = frozenset()) -> None:
        self.bus = bus
        self.heard = Heard()
        self.unknown: set[str] = set(strict)

    async def open(self) -> None:
        await self.bus.serve(subjects.REGISTRATION, self._register)
        await self.bus.serve(subjects.STATE_CHANGE, self._change)
        await self.bus.serve(subjects.INSTANCE_RECORD, self._register)
        await self.bus.serve(subjects.INSTANCE_STATE, self._change)

    async def _register(self, message: Registration, envelope: Envelope) -> RegistrationLease:
        await self.heard.add(message)
        return RegistrationLease(
            sid=message.record.sid, route_id=1, heartbeat_s=1.0, expiry_s=3.0, revision=1
        )

    async def _change(self, message: StateChange, envelope: Envelope) -> Ack:
        if message.sid in self.unknown:
            raise NotFound(f"{message.sid} is not registered")
        await self.heard.add(message)
        return Ack()

    async def state(self, sid: str, state: InstanceState) -> StateChange:
        found: StateChange = await self.heard.first(StateChange, lambda c: c.sid == sid and c.state is state)
        return found


class StandInOrchestrator:
    """Stands in for the SMO: gives orders to one agent and hears what comes back."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.heard = Heard()
        self.refused: list[Message] | None = None
        """Where it is a list, reports are not taken but come there."""

    async def open(self) -> None:
        rows = (
            *(subjects.NODE_STATUS, subjects.TOPOLOGY, subjects.ANALYSIS_FAILED, subjects.SAMPLE_WRITTEN),
            subjects.CLUSTER_REPORT,
        )
        for row in rows:
            await self.bus.serve(row, self._hear)
        await self.bus.subscribe(subjects.NODE_SAMPLE, self._sample)

    async def _hear(self, message: Message, envelope: Envelope) -> Ack:
        if self.refused is not None and isinstance(message, ClusterReport):
            self.refused.append(message)
            raise Unavailable("takes no reports now")
        await self.heard.add(message)
        return Ack()

    async def _sample(self, message: Message, envelope: Envelope) -> None:
        await self.heard.add(message)

    async def ask(self, agent: str, row: Subject, message: Message) -> Any:
        return await self.bus.command(row, message, deadline_s=PATIENCE_S, agent=agent)

    async def start(self, agent: str, order: InstanceStart) -> InstanceStarted:
        started: InstanceStarted = await self.ask(agent, subjects.START_INSTANCE, order)
        return started

    async def judge(self, agent: str, order: InstanceStart) -> Judgement:
        question = Judge(job=order.job, sid=order.unit.sid, incarnation=order.incarnation)
        judgement: Judgement = await self.ask(agent, subjects.JUDGE, question)
        return judgement

    async def stop(self, agent: str, order: InstanceStart, *, now: bool = False) -> Ack:
        message = InstanceStop(job=order.job, sid=order.unit.sid, incarnation=order.incarnation, now=now)
        ack: Ack = await self.ask(agent, subjects.STOP_INSTANCE, message)
        return ack

    async def status(self, agent: str, matching: Callable[[NodeStatus], bool]) -> NodeStatus:
        found: NodeStatus = await self.heard.first(NodeStatus, lambda s: s.sid == agent and matching(s))
        return found


@asynccontextmanager
async def stand_in_mesh(folder: Path) -> AsyncIterator[Mesh]:
    """A server with both stand-ins, until the end of the block."""
    async with (
        EmbeddedServer(folder / "nats") as server,
        Bus.connect(server.url, name="service-registry", kind=EntityKind.SERVICE_REGISTRY) as srd_bus,
        Bus.connect(server.url, name="orchestrator", kind=EntityKind.ORCHESTRATOR) as smo_bus,
    ):
        srd, smo = StandInRegistry(srd_bus), StandInOrchestrator(smo_bus)
        await srd.open()
        await smo.open()
        yield Mesh(server.url, folder, srd, smo)


class Mesh:
    """A bus with both stand-ins, and agents on it."""

    def __init__(self, url: str, folder: Path, srd: StandInRegistry, smo: StandInOrchestrator) -> None:
        self.url = url
        self.folder = folder
        self.srd = srd
        self.smo = smo

    @asynccontextmanager
    async def agent(
        self, cluster: str, *, real_torch: bool = False, **settings: Any
    ) -> AsyncIterator[ClusterAgent]:
        """An agent in this process; its node is called `n`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", python_path(stand_in_torch=not real_torch))
            async with self._agent(cluster, settings) as agent:
                yield agent

    @asynccontextmanager
    async def _agent(self, cluster: str, settings: dict[str, Any]) -> AsyncIterator[ClusterAgent]:
        config = ClusterConfig(
            cluster=cluster,
            node="n",
            servers=(self.url,),
            logs=self.folder / "logs",
            code_path=(str(HERE),),
            **{
                "capabilities": self.folder / "capabilities",
                "slots": 4,
                "device": "cpu",
                "worker_package": "cluster_stand_ins",
                "stop_grace_s": 0.5,
                **settings,
            },
        )
        async with Bus.connect(self.url, name=config.sid, kind=EntityKind.CLUSTER) as bus:
            agent, ready = ClusterAgent(bus, config), asyncio.Event()
            running = asyncio.create_task(agent.run(ready))
            try:
                waiting = asyncio.create_task(self.smo.status(config.sid, lambda status: status.warm))
                await asyncio.wait(
                    {running, waiting}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if running.done():
                    waiting.cancel()
                    running.result()
                assert ready.is_set()
                waiting.result()  # warm: its slots are known
                yield agent
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled() or running.exception() is not None

    def log(self, order: InstanceStart) -> str:
        path = self.folder / "logs" / f"{order.unit.sid}.log"
        return path.read_text() if path.exists() else ""


def python_path(*, stand_in_torch: bool) -> str:
    """`PYTHONPATH` as given, and behind it the stand-in for torch, or not."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kept = [path for path in given if path != str(STAND_IN_TORCH)]
    return os.pathsep.join([*kept, str(STAND_IN_TORCH)] if stand_in_torch else kept)


def job_name() -> str:
    return f"j{secrets.token_hex(3)}"


def spec(name: str = "job", *, source: str = "stdlib:", threads: int = 1) -> JobSpec:
    return JobSpec(
        name=name,
        model=ModelSpec(factory="tiny:model"),
        data=DataSpec(source=source),
        training=TrainingSpec(steps=1, compute_threads=threads),
    )


def start(
    job: str,
    *deeds: str,
    stage: int = 0,
    replica: int = 0,
    slot: int = 0,
    cost_ms: float = 0.0,
    **more: Any,
) -> InstanceStart:
    unit = TaskUnit(
        sid=f"{job}-s{stage}-r{replica}" if stage >= 0 else f"{job}-data-r{replica}",
        kind=UnitKind.STAGE if stage >= 0 else UnitKind.DATA,
        stage=stage,
        replica=replica,
        first_layer=max(stage, 0),
        last_layer=stage + 1,
        requirements=ComputeRequirements(cost_ms=cost_ms),
        tags=tuple(f"do:{deed}" for deed in deeds),
    )
    settings = {"epoch": 1, "spec": spec(threads=2), "incarnation": secrets.token_hex(4), **more}
    return InstanceStart(
        job=job, unit=unit, slot=slot, stages=2, layer_count=2, code_digest="abc", **settings
    )


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
