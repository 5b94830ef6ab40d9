"""A job's checkpoints with stand-in instances and a stand-in node, on a real bus."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.files.artifacts import open_artifacts
from bus.messaging.handlers import Subscription
from entities.orchestrator.checkpointing.checkpoints import Checkpoints
from entities.orchestrator.job_state.instances import JobInstances
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.checkpoint import (
    CheckpointFile,
    CheckpointOrder,
    CheckpointTaken,
    CheckpointWait,
    CheckpointWritten,
    StageCheckpoint,
)
from schemas.cluster import NodeStatus
from schemas.envelope import Envelope
from schemas.errors import Ack, DamagedCheckpoint, DmscError, Unavailable
from schemas.files import FilesRead, PublishFile, ReadFiles, RemoveCheckpoints
from schemas.job import JobEvent, JobRecord, JobSpec, JobState, StepResult
from schemas.step import Member, StateReady, StateRestore
from schemas.task_graph import TaskGraph, TaskUnit, UnitKind
from tests.job_context import job_context

CONTENT = b"weights of a stage"


class StandIn:
    """One stage: writes a file when it is told, and not before `go_on` is set."""

    def __init__(self, bus: Bus, stage: int) -> None:
        self.bus = bus
        self.stage = stage
        self.member = Member(sid=f"{JOB}-s{stage}-r0", incarnation="i1")
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.asked = asyncio.Event()
        self.fails: DmscError | None = None
        self.damaged: set[int] = set()
        self.unreachable = False
        self.restored: list[tuple[int, str | None]] = []
        self.silent: DmscError | None = None
        self.unanswered: list[PublishFile] = []

    async def serve(self) -> None:
        for row, handler in (
            (subjects.CHECKPOINT, self._take),
            (subjects.CHECKPOINT_WAIT, self._write),
            (subjects.STATE_RESTORE, self._restore),
            (subjects.PUBLISH_FILE, self._publish),
        ):
            await self.bus.serve(row, handler, job=JOB, sid=self.member.sid)

    async def _take(self, order: CheckpointOrder, _: object) -> CheckpointTaken:
        return CheckpointTaken(member=self.member, version=order.version, bytes=len(CONTENT), stall_ms=1.0)

    async def _write(self, query: CheckpointWait, _: object) -> CheckpointWritten:
        folder = f"stage-{self.stage:05d}"
        await open_artifacts(query.url, self.bus).put_bytes(f"{folder}/data", CONTENT)
        self.asked.set()
        await self.go_on.wait()
        if self.fails is not None:
            raise self.fails
        file = CheckpointFile(name="data", bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())
        part = StageCheckpoint(
            stage=self.stage,
            folder=folder,
            first_layer=self.stage,
            last_layer=self.stage + 1,
            files=(file,),
            torch_version="2.13.0",
        )
        return CheckpointWritten(member=self.member, version=0, part=part, write_ms=1.0)

    async def _publish(self, order: PublishFile, _: object) -> Ack:
        if self.silent is not None:
            self.unanswered.append(order)
            raise self.silent
        await self.publish(order)
        return Ack()

    @staticmethod
    async def publish(order: PublishFile) -> None:
        await open_artifacts(order.url, None).put_bytes(order.name, order.data)

    async def _restore(self, order: StateRestore, _: object) -> StateReady:
        if self.unreachable:
            raise Unavailable("the store does not answer")
        if order.version in self.damaged:
            raise DamagedCheckpoint(f"{order.checkpoint}/stage-00000/data is damaged")
        self.restored.append((order.version, order.checkpoint))
        return StateReady(member=self.member, version=order.version)


JOB = "jtest"
NODE = NodeStatus(
    sid="a-n", cluster="a", node="n", incarnation="i1", slots=(), address="127.0.0.1", warm=True
)
"""Where files are read and removed for the orchestrator."""


async def serve_node(bus: Bus) -> list[Subscription]:
    """As a node does, without a worker: small files, whole."""
    return [
        await bus.serve(subjects.READ_FILES, read_files, agent=NODE.sid),
        await bus.serve(subjects.REMOVE_CHECKPOINTS, remove_checkpoints, agent=NODE.sid),
    ]


async def remove_checkpoints(order: RemoveCheckpoints, envelope: Envelope) -> Ack:
    for name in order.folders:
        await open_artifacts(f"{order.artifacts}/{order.job}/checkpoints/{name}", None).delete()
    return Ack()


async def read_files(order: ReadFiles, envelope: Envelope) -> FilesRead:
    artifacts = open_artifacts(order.url, None)
    if order.what == "list":
        return FilesRead(names=tuple(await artifacts.list(order.name)))
    data = await artifacts.get_bytes(order.name)
    return FilesRead(data=data[order.start : order.start + order.count], size=len(data))


class Rig:
    """Two stages and the orchestrator's part, without a mesh around them."""

    def __init__(self, bus: Bus, stand_ins: list[StandIn], folder: Path, **more: Any) -> None:
        spec = JobSpec.model_validate(
            {
                "name": "rig",
                "model": {"factory": "workers.models.gpt:byte_gpt"},
                "training": {"steps": 100, "checkpoint_every": 2},
                "parallel": {"stages": 2},
                "artifacts": str(folder),
                **more,
            }
        )
        self.bus = bus
        self.spec = spec
        self.stand_ins = stand_ins
        self.folder = folder / JOB / "checkpoints"
        self.node: list[Subscription] = []

    async def start(self, epoch: int) -> None:
        """As an orchestrator does that takes the job up."""
        record = JobRecord(
            job=JOB, spec=self.spec, state=JobState.RUNNING, epoch=epoch, submitted_at=0, changed_at=0
        )
        held = await self.bus.bucket(subjects.JOB_RECORD).get(leader=True, job=JOB)
        self.journal = JobStore(self.bus, record, held.revision if held is not None else 0)
        self.mesh = MeshView()
        await self.mesh.node(NODE)
        self.instances = JobInstances(self.bus, self.mesh, record)
        units = tuple(
            TaskUnit(sid=one.member.sid, kind=UnitKind.STAGE, stage=one.stage, replica=0)
            for one in self.stand_ins
        )
        self.instances.graph = TaskGraph(units=units, edges=())
        self.instances.members = {one.member.sid: one.member for one in self.stand_ins}
        self.checkpoints = Checkpoints(
            job_context(
                record,
                bus=self.bus,
                mesh=self.mesh,
                instances=self.instances,
                store=self.journal,
                decisions=SimpleNamespace(replaced=0),
            )
        )

    def commit(self, step: int, step_s: float) -> None:
        """A step of so many seconds was decided."""
        self.checkpoints.committed(
            StepResult(
                step=step,
                loss=1.0,
                gradient_norm=1.0,
                learning_rate=0.1,
                tokens=1,
                step_s=step_s,
                tokens_per_s=1.0,
            )
        )

    async def take(self, step: int) -> None:
        """A checkpoint at `step`, until it is published or dropped."""
        await self.checkpoints.at_boundary(step, self.instances.stages())
        await self.checkpoints.finish()

    def left(self) -> list[str]:
        """Every file below the job's checkpoints."""
        if not self.folder.exists():
            return []
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    async def told(self) -> list[str]:
        entries = [one async for one in self.bus.history(subjects.JOB_EVENT, job=JOB)]
        messages = [entry.message for entry in entries if isinstance(entry.message, JobEvent)]
        return [message.text for message in messages if message.kind == "checkpoint"]
