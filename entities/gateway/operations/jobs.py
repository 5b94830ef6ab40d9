"""Operations on jobs and nodes, for both APIs, and the NATS request API itself.

Each operation is checked by Type 3 at the AAM first, and then sent to the orchestrator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.subject import Reply, Request, Subject
from bus.wire.correlation import caller_span, correlate, current, current_cause, new_correlation
from entities.gateway.operations.access_client import AccessClient, Bearer
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.idempotency import Answer, IdempotencyStore, request_digest
from entities.gateway.operations.job_urls import (
    READ_ARTIFACT,
    named_things,
    names_folders,
    refuse_others_folder,
    refuse_urls,
)
from entities.gateway.operations.job_view import JobCache
from entities.gateway.operations.modules import ModuleOperations, resource_of
from entities.gateway.operations.secrets import SecretOperations
from entities.gateway.storage.usage import StoredUse
from schemas.base import Message
from schemas.door import (
    DOOR_KEY,
    CancelJob,
    ChangeStage,
    CordonPlace,
    Cordons,
    DoorKey,
    DoorRequest,
    FaultList,
    JobList,
    JobLoad,
    JobQuery,
    MeshQuery,
    MeshStatus,
    ParkJob,
    ResumeJob,
    ScaleJob,
    SubmitJob,
    UncordonPlace,
)
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, BadInput, BadJob, DmscError, InProgress, NotFound, Refused
from schemas.fault import FaultRecord
from schemas.job import JobRecord, JobSpec
from schemas.module_status import OrderBody, QuestionBody
from schemas.policy import ModuleLifecycle
from schemas.signals import ComputeEntry
from schemas.urls import bus_name

Body = TypeVar("Body", OrderBody, QuestionBody)

log = get_logger("gateway")

TIMEOUT_S = 3.0  # one query to the orchestrator, repeated while nobody leads: longer than a failover
PAUSE_S = 0.1  # between two checks whether another gateway has answered the same request
DEADLINE_S = 15.0  # one command to the orchestrator, repeated until answered


class JobOperations:
    """Operations on jobs, nodes and faults. `compute` returns the last Type 4 entries by cluster.

    `view`, where it is set (with an HTTP API), answers reads without a message to the orchestrator.
    """

    def __init__(
        self,
        bus: Bus,
        backends: Backends,
        gateway: str,
        guard: AccessClient,
        compute: Callable[[], Mapping[str, tuple[ComputeEntry, ...]]],
        kept: IdempotencyStore,
    ) -> None:
        self.guard = guard
        self.modules = ModuleOperations(bus, backends, guard)
        self.secrets = SecretOperations(bus, guard)
        self.view: JobCache | None = None
        self.stored = StoredUse(bus, lambda: () if self.view is None else self.view.all())
        self._compute = compute
        self._kept = kept
        self._bus = bus
        self._backends = backends
        self._gateway = gateway

    async def submit(self, bearer: Bearer, spec: JobSpec, cause: Envelope | str | None = None) -> JobRecord:
        """Submits a job.

        `cause` identifies the client's own command: a repetition through another gateway is recognised by it.
        """
        if current() is None:  # a client on the bus that sent no correlation
            correlate(new_correlation(), cause=current_cause())
        access = await bearer.check("job.submit", spec.name)
        refuse_urls(spec)
        may_read = await self._let_read(bearer, spec, access.user)
        spec = await self.secrets.keep(spec, access.user)
        await self.stored.admit_job(access)
        message = SubmitJob(
            spec=spec,
            user=access.user,
            gateway=self._gateway,
            caller_span=caller_span(),
            quota=access.quota,
            may_read=may_read,
        )
        record = await self._backends.command(subjects.SUBMIT, message, deadline_s=DEADLINE_S, cause=cause)
        return self._learn(record)

    async def _let_read(self, bearer: Bearer, spec: JobSpec, user: str) -> tuple[str, ...]:
        """The bus URLs that the job reads and its user may read.

        Raises:
            Refused: the user may not read one of the things that the job names.
            BadJob: the job would write into the folder of another user's job.
        """
        jobs: Mapping[str, JobRecord] = {}
        if names_folders(spec):
            jobs = {record.job: record for record in (await self._all()).jobs}
            refuse_others_folder(spec, user, jobs)
        found = named_things(spec, jobs)
        for one in found:
            try:
                await bearer.check(one.action, one.resource)
            except Refused as error:
                remedy = (
                    "its owner or an administrator may name it, and access rules share it"
                    if one.action == READ_ARTIFACT
                    else "ask an administrator, who keeps the access rules"
                )
                raise Refused(f"{one.key}: {one.url}: {error.text}; {remedy}", **error.fields) from None
        return tuple(one.url for one in found if bus_name(one.url))

    async def list(self, bearer: Bearer) -> JobList:
        await bearer.check("job.list", "jobs")
        return await self._all()

    async def read(self, bearer: Bearer, job: str) -> JobRecord:
        await bearer.check("job.read", job)
        return await self.look(job)

    async def files_of(self, bearer: Bearer, job: str) -> JobRecord:
        """The record of a job, for a bearer who may fetch its weights and checkpoints."""
        await bearer.check(READ_ARTIFACT, job)
        return await self.look(job)

    async def look(self, job: str) -> JobRecord:
        """The job's record, for a request whose access was checked already. Raises `NotFound`."""
        known = self.view.get(job) if self.view is not None else None
        if known is not None:
            return known
        answer = await self._query(job)
        for record in answer.jobs:
            if record.job == job:
                return record
        raise NotFound(f"there is no job {job}; list them to see which there are", job=job)

    async def load(self, bearer: Bearer, job: str) -> JobLoad:
        """The last measurements of the job's instances; empty for a job that has no instances."""
        await bearer.check("job.read", job)
        told = (entry for entries in self._compute().values() for entry in entries if entry.job == job)
        return JobLoad(job=job, entries=tuple(sorted(told, key=lambda entry: entry.sid)))

    async def scale(self, bearer: Bearer, job: str, replicas: int, stage: int | None) -> Ack:
        access = await bearer.check("job.change", job)
        message = ScaleJob(job=job, replicas=replicas, stage=stage, user=access.user, quota=access.quota)
        return await self._backends.command(subjects.SCALE, message, deadline_s=DEADLINE_S)

    async def change_stage(self, bearer: Bearer, job: str, sid: str, stage: int) -> Ack:
        access = await bearer.check("job.change", job)
        message = ChangeStage(job=job, sid=sid, stage=stage, user=access.user)
        return await self._backends.command(subjects.CHANGE_STAGE, message, deadline_s=DEADLINE_S)

    async def cancel(self, bearer: Bearer, job: str, reason: str) -> JobRecord:
        access = await bearer.check("job.cancel", job)
        message = CancelJob(job=job, user=access.user, reason=reason)
        return await self._free(subjects.CANCEL, message)

    async def park(self, bearer: Bearer, job: str, reason: str) -> JobRecord:
        access = await bearer.check("job.park", job)
        message = ParkJob(job=job, user=access.user, reason=reason)
        return await self._free(subjects.PARK, message)

    async def resume(self, bearer: Bearer, job: str) -> JobRecord:
        access = await bearer.check("job.resume", job)
        message = ResumeJob(job=job, user=access.user)
        return self._learn(await self._backends.command(subjects.RESUME, message, deadline_s=DEADLINE_S))

    async def mesh(self, bearer: Bearer) -> MeshStatus:
        await bearer.check("mesh.read", "mesh")
        return await self._backends.command(subjects.MESH_QUERY, MeshQuery(), deadline_s=TIMEOUT_S)

    async def cordon(
        self, bearer: Bearer, node: str, slot: int | None, reason: str, *, drain: bool
    ) -> Cordons:
        """Keeps new instances off a node or a slot; with `drain`, moves those that run there elsewhere."""
        access = await bearer.check("node.drain" if drain else "node.cordon", node)
        message = CordonPlace(node=node, slot=slot, reason=reason, user=access.user, drain=drain)
        return await self._backends.command(subjects.CORDON_PLACE, message, deadline_s=DEADLINE_S)

    async def uncordon(self, bearer: Bearer, node: str, slot: int | None) -> Cordons:
        access = await bearer.check("node.uncordon", node)
        message = UncordonPlace(node=node, slot=slot, user=access.user)
        return await self._backends.command(subjects.UNCORDON_PLACE, message, deadline_s=DEADLINE_S)

    async def faults(self, bearer: Bearer, job: str | None) -> FaultList:
        """The last record of each fault, from the queue's stream. `job` None: of all jobs and the mesh."""
        await bearer.check("fault.read", job or "faults")
        last: dict[str, FaultRecord] = {}
        tokens: dict[str, Any] = {} if job is None else {"job": job}
        async for recorded in self._bus.history(subjects.FAULT_RECORD, **tokens):
            if isinstance(recorded.message, FaultRecord):
                last[recorded.message.id] = recorded.message
        found = sorted(last.values(), key=lambda fault: fault.opened_at)
        return FaultList(faults=tuple(found))

    def has_ended(self, job: str) -> bool:
        """Whether this gateway knows that the job has ended."""
        return self.view is not None and self.view.has_ended(job)

    async def _free(self, row: Subject[Request, JobRecord], message: Request) -> JobRecord:
        return self._learn(await self._backends.command(row, message, deadline_s=DEADLINE_S, always=True))

    def _learn(self, record: JobRecord) -> JobRecord:
        if self.view is not None:
            self.view.take(record)
        return record

    async def _all(self) -> JobList:
        if self.view is not None and self.view.current.is_set():
            return JobList(jobs=self.view.all())
        return await self._query(None)

    async def _query(self, job: str | None) -> JobList:
        return await self._backends.command(subjects.QUERY, JobQuery(job=job), deadline_s=TIMEOUT_S)

    # --- the NATS request API --------------------------------------------------------------------------
    async def answer(self, request: DoorRequest, envelope: Envelope) -> Message:
        """Handles `DOOR`. Jobs, also a single one, come as a `JobList`; others as their own type."""
        begun = time.monotonic()
        outcome = "internal"
        try:
            reply = await self._act(request, envelope)
            outcome = "ok"
            return reply
        except DmscError as error:
            outcome = error.code
            raise
        finally:
            log.info(
                "door request",
                action=request.action,
                job=request.job,
                client=envelope.sender.name,
                outcome=outcome,
                ms=round(1e3 * (time.monotonic() - begun), 1),
            )

    async def _act(self, request: DoorRequest, envelope: Envelope) -> Message:
        if request.action == DOOR_KEY:
            return DoorKey(key=self._bus.keyring.of_kind(EntityKind.GATEWAY))
        bearer = Bearer(request.token, self.guard)
        actions: dict[str, Callable[[], Awaitable[Message]]] = {
            "job.submit": lambda: self.submit(bearer, _spec(request), envelope),
            "job.list": lambda: self.list(bearer),
            "job.read": lambda: self.read(bearer, _job(request)),
            "job.cancel": lambda: self.cancel(bearer, _job(request), "asked for at the NATS door"),
            "job.park": lambda: self.park(bearer, _job(request), "asked for at the NATS door"),
            "job.resume": lambda: self.resume(bearer, _job(request)),
            "mesh.read": lambda: self.mesh(bearer),
            "policy.list": lambda: self.modules.modules(bearer),
            "policy.order": lambda: self._order(bearer, request, envelope),
            "policy.ask": lambda: self.modules.ask(
                bearer, _module(request), _given(request, request.question)
            ),
            "observation.write": lambda: self._observe(bearer, request, envelope),
        }
        action = actions.get(request.action)
        if action is None:
            raise BadInput(f"{request.action}: unknown action; there are {', '.join(actions)}")
        reply = await action()
        return JobList(jobs=(reply,)) if isinstance(reply, JobRecord) else reply

    async def _order(self, bearer: Bearer, request: DoorRequest, envelope: Envelope) -> Message:
        module, body = _module(request), _given(request, request.order)

        async def act() -> ModuleLifecycle:
            return await self.modules.order(bearer, module, body)

        return await self._once(bearer, request, envelope, "policy.write", module, ModuleLifecycle, act)

    async def _observe(self, bearer: Bearer, request: DoorRequest, envelope: Envelope) -> Message:
        async def act() -> Ack:
            return await self.modules.observe(bearer, request.observations)

        about = resource_of(request.observations)
        return await self._once(bearer, request, envelope, "observation.write", about, Ack, act)

    async def _once(
        self,
        bearer: Bearer,
        request: DoorRequest,
        envelope: Envelope,
        action: str,
        resource: str,
        answers: type[Reply],
        act: Callable[[], Awaitable[Reply]],
    ) -> Reply:
        """Runs `act` and returns its answer; a repetition, through any gateway, gets the first answer.

        The request's secrets are bound to the envelope's id: an eavesdropper could only repeat the request.
        """
        access = await bearer.check(action, resource)
        body = request.model_dump_json(exclude={"token"}).encode()
        digest = request_digest("NATS", request.action, "", body)

        async def acted() -> Answer:
            return Answer((await act()).model_dump_json())

        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                kept = await self._kept.once(access.user, f"door {envelope.id}", digest, acted)
                return answers.model_validate_json(kept.body)
            except InProgress:  # another gateway is answering this request: wait for its answer
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(PAUSE_S)


def _spec(request: DoorRequest) -> JobSpec:
    if request.spec is None:
        raise BadJob("spec: missing; job.submit needs the job's specification")
    return request.spec


def _job(request: DoorRequest) -> str:
    if request.job is None:
        raise BadInput(f"job: missing; {request.action} needs a job's id")
    return request.job


def _module(request: DoorRequest) -> str:
    if request.module is None:
        raise BadInput(f"module: missing; {request.action} needs a module's name")
    return request.module


def _given(request: DoorRequest, body: Body | None) -> Body:
    if body is None:
        raise BadInput(f"{request.action.removeprefix('policy.')}: missing; {request.action} needs its body")
    return body
