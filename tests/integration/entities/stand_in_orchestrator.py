"""What a gateway needs of the SMO, over the real bus: jobs in memory, their records, events and weights."""

from __future__ import annotations

from bus import subjects
from bus.connection import Bus
from bus.files.artifacts import open_artifacts
from bus.messaging.handlers import Server
from bus.subject_row import Subject
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import Ack, Conflict, NotFound
from schemas.fault import FaultReport
from schemas.gateway_api import (
    CancelJob,
    JobList,
    JobQuery,
    JobSummary,
    MeshQuery,
    MeshStatus,
    ParkJob,
    ResumeJob,
    SubmitJob,
)
from schemas.job import ENDED, JobEvent, JobRecord, JobState, WeightsManifest
from schemas.queue import (
    CancelReservation,
    QueueQuery,
    QueueStatus,
    Reservations,
    ReservationsQuery,
    ReserveSlots,
    SlotsReserved,
)
from schemas.signals import CommunicationPolicy, NodeRegistration
from tests.builders.records import service
from tests.patience import PATIENCE_S

SHARD = bytes(range(256)) * 40


class StandInOrchestrator:
    """Takes jobs and keeps them; trains nothing."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.jobs: dict[str, JobRecord] = {}
        self.users: list[str] = []
        self.may_read: list[tuple[str, ...]] = []
        self.causes: list[str | None] = []
        self.origins: list[tuple[str | None, str]] = []
        self.faults: list[FaultReport] = []
        self.nodes: list[NodeRegistration] = []
        self.cancelling: Server | None = None  # instead of what a cancel does

    async def serve(self) -> None:
        handlers: tuple[tuple[Subject, Server], ...] = (
            (subjects.SUBMIT, self._submit),
            (subjects.CANCEL, self._cancel),
            (subjects.PARK, self._park),
            (subjects.RESUME, self._resume),
            (subjects.QUERY, self._query),
            (subjects.QUEUE_QUERY, self._queue),
            (subjects.RESERVATIONS_QUERY, self._reservations),
            (subjects.RESERVE_SLOTS, self._reserve),
            (subjects.CANCEL_RESERVATION, self._cancel_reservation),
            (subjects.MESH_QUERY, self._mesh),
            (subjects.FAULT_REPORT, self._fault),
            (subjects.MESH_REGISTRATION, self._register),
        )
        for row, handler in handlers:
            await self.bus.serve(row, handler)

    async def tell(self, job: str, state: JobState, text: str = "") -> int:
        """The job moves: record, bucket, event."""
        record = self.jobs[job].model_copy(update={"state": state})
        self.jobs[job] = record
        await self.bus.bucket(subjects.JOB_RECORD).put(record, job=job)
        event = JobEvent(job=job, kind="state", at=1.0, state=state, text=text)
        return await self.bus.append(subjects.JOB_EVENT, event, job=job)

    async def finish(self, job: str) -> None:
        """One shard of weights, then done."""
        url = f"bus://artifacts/{job}/weights"
        await open_artifacts(url, self.bus).put_bytes("stage-0.safetensors", SHARD)
        manifest = WeightsManifest(
            url=url,
            shards=("stage-0.safetensors",),
            tensors={"head.weight": "stage-0.safetensors"},
            bytes=len(SHARD),
            sha256="0" * 64,
            step=2,
        )
        self.jobs[job] = self.jobs[job].model_copy(update={"weights": manifest})
        await self.tell(job, JobState.DONE)

    async def send(self, message: CommunicationPolicy, sid: str) -> Ack:
        answer = await self.bus.command(subjects.QOS_POLICY, message, deadline_s=PATIENCE_S, sid=sid)
        assert isinstance(answer, Ack)
        return answer

    async def _submit(self, message: SubmitJob, envelope: Envelope) -> JobRecord:
        job = f"{message.spec.name}-{len(self.jobs) + 1}"
        self.users.append(message.user)
        self.may_read.append(message.may_read)
        self.causes.append(envelope.causation)
        self.origins.append((envelope.correlation, message.caller_span))
        self.jobs[job] = JobRecord(
            job=job,
            spec=message.spec,
            state=JobState.QUEUED,
            user=message.user,
            submitted_at=1.0,
            changed_at=1.0,
        )
        await self.tell(job, JobState.QUEUED)
        return self.jobs[job]

    async def _cancel(self, message: CancelJob, envelope: Envelope) -> Message:
        if self.cancelling is not None:
            return await self.cancelling(message, envelope)
        return await self._move(message.job, JobState.CANCELLED, message.reason)

    async def _park(self, message: ParkJob, envelope: Envelope) -> JobRecord:
        return await self._move(message.job, JobState.PARKED, f"parked by {message.user}: {message.reason}")

    async def _resume(self, message: ResumeJob, envelope: Envelope) -> JobRecord:
        return await self._move(message.job, JobState.RUNNING, f"resumed by {message.user}")

    async def _move(self, job: str, state: JobState, text: str) -> JobRecord:
        record = self.jobs.get(job)
        if record is None:
            raise NotFound(f"there is no job {job}")
        if record.state in ENDED:
            raise Conflict(f"{job} is {record.state} already")
        self.jobs[job] = record.model_copy(update={"reason": text})
        await self.tell(job, state, text)
        return self.jobs[job]

    async def _query(self, message: JobQuery, envelope: Envelope) -> JobList:
        return JobList(jobs=tuple(r for r in self.jobs.values() if message.job in (None, r.job)))

    async def _queue(self, message: QueueQuery, envelope: Envelope) -> QueueStatus:
        if message.job is not None and message.job not in self.jobs:
            raise NotFound(f"no job {message.job}: `dmsc jobs` lists them")
        return QueueStatus(order="fcfs", slots=2, free=0, waiting=0, lacking=0)

    async def _reservations(self, message: ReservationsQuery, envelope: Envelope) -> Reservations:
        return Reservations()

    async def _reserve(self, message: ReserveSlots, envelope: Envelope) -> Reservations:
        return Reservations(reservations=(SlotsReserved(spec=message.spec, by=message.by, at=0.0),))

    async def _cancel_reservation(self, message: CancelReservation, envelope: Envelope) -> Reservations:
        raise NotFound(f"no reservation {message.name}; there are none")

    async def _mesh(self, message: MeshQuery, envelope: Envelope) -> MeshStatus:
        jobs = tuple(
            JobSummary(job=r.job, name=r.spec.name, state=r.state, step=r.step, steps=r.spec.training.steps)
            for r in self.jobs.values()
        )
        return MeshStatus(services=(service(),), nodes=(), jobs=jobs)

    async def _fault(self, message: FaultReport, envelope: Envelope) -> Ack:
        self.faults.append(message)
        return Ack()

    async def _register(self, message: NodeRegistration, envelope: Envelope) -> Ack:
        self.nodes.append(message)
        return Ack()
