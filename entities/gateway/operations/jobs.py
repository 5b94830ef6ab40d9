"""Operations on jobs and nodes, for both APIs (over NATS: `nats_door.py`).

Each operation is checked by Type 3 at the AAM first. What changes a job or a node is then sent to the
orchestrator; reads are answered from the gateway's own copies where it has them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.subject_row import Reply, Request, Subject
from bus.wire.correlation import caller_span, correlate, current, current_cause, new_correlation
from entities.gateway.feeds.feed_log import FeedLog
from entities.gateway.operations.access_client import AccessClient, Bearer, check_each
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.code import CodeOperations
from entities.gateway.operations.idempotency import key_token
from entities.gateway.operations.job_urls import (
    READ_FEED,
    Named,
    named_things,
    names_folders,
    refuse_for_analysis,
    refuse_others_folder,
    refuse_urls,
    unresolved,
    weights_on_bus,
    without_weights,
)
from entities.gateway.operations.job_view import JobCache
from entities.gateway.operations.modules import ModuleOperations
from entities.gateway.operations.operation import Operation
from entities.gateway.operations.secrets import SecretOperations
from entities.gateway.storage.usage import StoredUse
from schemas.cluster import LeaveNotice, LeaveSource
from schemas.data_set.fitting import files_on_bus
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, BadJob, NotFound, UnreadableRecord
from schemas.fault import FaultRecord
from schemas.gateway_api import (
    CancelJob,
    ChangeStage,
    CordonPlace,
    Cordons,
    FaultList,
    JobList,
    JobLoad,
    JobQuery,
    MeshQuery,
    MeshStatus,
    ParkJob,
    PrioritiseJob,
    ResumeJob,
    ScaleJob,
    SubmitJob,
    UncordonPlace,
)
from schemas.job import JobRecord, JobSpec
from schemas.plans import MakePlan, PlanBody, PlanMade, planned_job
from schemas.queue import (
    CancelReservation,
    QueueQuery,
    QueueStatus,
    Reservations,
    ReservationSpec,
    ReservationsQuery,
    ReserveSlots,
)
from schemas.recut import RecutAnswer, RecutJob, cuts_of
from schemas.signals import AccessDecision, ComputeEntry
from schemas.urls import bus_name

Value = TypeVar("Value")

log = get_logger("gateway")


Resolve = Callable[[JobSpec, Bearer, str], Awaitable[JobSpec]]
"""From a job, its bearer and that user's name to the job with the version of each data set that it names."""


@dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """Deadlines, in seconds."""

    query_s: float = 3.0  # one query to the orchestrator, repeated while nobody leads: longer than a failover
    command_s: float = 15.0  # one command to the orchestrator, repeated until answered
    plan_s: float = 140.0  # one plan: longer than its turn, an analysis and two searches together
    pause_s: float = 0.1  # between two checks whether another gateway has answered the same request


class JobOperations:
    """Operations on jobs, nodes and faults. `compute` returns the last Type 4 entries by cluster.

    `cache` answers reads without a message to the orchestrator; `Gateway.run` keeps it current.
    """

    def __init__(
        self,
        bus: Bus,
        backends: Backends,
        gateway: str,
        access: AccessClient,
        compute: Callable[[], Mapping[str, tuple[ComputeEntry, ...]]],
        times: OperationTimes = OperationTimes(),
    ) -> None:
        self.access = access
        self.modules = ModuleOperations(bus, backends)
        self.secrets = SecretOperations(bus)
        self.cache = JobCache(bus)
        self.code = CodeOperations(bus, self.cache.all)
        self.feeds = FeedLog(bus)
        self.stored = StoredUse(bus, self.cache.all, self.feeds)
        self.times = times
        self.resolve: Resolve | None = None
        """Fixes the versions of data sets that a job names; `Gateway` sets it."""
        self.with_models: Resolve | None = None
        """Fixes the version of the model that a job begins with; likewise."""
        self._compute = compute
        self._bus = bus
        self._backends = backends
        self.gateway = gateway

    def submit(
        self, bearer: Bearer, spec: JobSpec, *, cause: Envelope | None = None, key: str | None = None
    ) -> Operation[JobRecord]:
        """Submits a job.

        A repetition through another gateway is recognised by the client's own command, `cause`, or by the
        request's idempotency key.
        """

        if current() is None:  # a client on the bus that sent no correlation
            correlate(new_correlation(), cause=current_cause())

        async def act(access: AccessDecision) -> JobRecord:
            if spec.array is not None:
                raise BadJob("array: this file stands for many jobs: submit it with POST /v1/arrays")
            if spec.serve is not None:
                raise BadJob("serve: this file is a version of a service: deploy it with POST /v1/services")
            recorded, may_read = await self.admitted(bearer, spec, access)
            await self.stored.admit_job(access)
            message = SubmitJob(
                spec=recorded,
                user=access.user,
                gateway=self.gateway,
                caller_span=caller_span(),
                quota=access.quota,
                may_read=may_read,
            )
            record = await self._backends.command(
                subjects.SUBMIT,
                message,
                deadline_s=self.times.command_s,
                cause=cause if key is None else f"key.{key_token(access.user, key)}",
            )
            self.cache.take(record)
            return record

        return Operation("job.submit", spec.name, act)

    async def admitted(
        self, bearer: Bearer, spec: JobSpec, access: AccessDecision
    ) -> tuple[JobSpec, tuple[str, ...]]:
        """The job in the form that is recorded, and what it may read on the bus.

        Raises:
            Refused, BadJob, NotFound: it names what its user may not read, or what is not there.
        """
        asked = unresolved(spec)
        if self.with_models is not None:
            asked = await self.with_models(asked, bearer, access.user)
        refuse_urls(asked)
        may_read = (*await self._let_read(bearer, asked, access.user), *weights_on_bus(asked))
        with_code = await self.code.admit(bearer, asked, access.user)
        if with_code.code is not None and with_code.code.url is not None:
            may_read = (*may_read, with_code.code.url)
        kept = await self.secrets.keep(with_code, access.user)
        recorded = kept if self.resolve is None else await self.resolve(kept, bearer, access.user)
        return recorded, (*may_read, *files_on_bus(recorded))

    async def _let_read(self, bearer: Bearer, spec: JobSpec, user: str) -> tuple[str, ...]:
        """The bus URLs that the job reads and its user may read.

        Raises:
            Refused: the user may not read one of the things that the job names.
            BadJob: the job would write into the folder of another user's job.
            NotFound: the job names a feed that there is not.
        """
        jobs: Mapping[str, JobRecord] = {}
        if names_folders(spec):
            jobs = {record.job: record for record in (await self.all_records()).jobs}
            refuse_others_folder(spec, user, jobs)
        things = named_things(spec, jobs)
        await check_each(bearer, things)
        for thing in things:
            if thing.action == READ_FEED:
                await self._require_feed(thing)
        return tuple(thing.url for thing in things if bus_name(thing.url))

    async def _require_feed(self, named: Named) -> None:
        try:
            await self.feeds.find(named.resource)
        except (NotFound, UnreadableRecord) as error:
            raise type(error)(f"{named.key}: {error.text}", **error.fields) from None

    def list(self) -> Operation[JobList]:
        return Operation("job.list", "jobs", lambda _: self.all_records())

    def read(self, job: str, action: str = "job.read") -> Operation[JobRecord]:
        """The job's record. `action`: `READ_ARTIFACT` for a bearer who fetches weights or checkpoints.

        Raises `NotFound`.
        """
        return Operation(action, job, lambda _: self._look(job))

    async def _look(self, job: str) -> JobRecord:
        known = self.cache.get(job)
        if known is not None:
            return known
        answer = await self._query(job)
        for record in answer.jobs:
            if record.job == job:
                return record
        raise NotFound(f"there is no job {job}; list them to see which there are", job=job)

    def load(self, job: str) -> Operation[JobLoad]:
        """The last measurements of the job's instances; empty for a job that has no instances."""

        async def act(_: AccessDecision) -> JobLoad:
            entries = (entry for cluster in self._compute().values() for entry in cluster if entry.job == job)
            return JobLoad(job=job, entries=tuple(sorted(entries, key=lambda entry: entry.sid)))

        return Operation("job.read", job, act)

    def scale(self, job: str, replicas: int, stage: int | None, unit: str = "") -> Operation[Ack]:
        def message(access: AccessDecision) -> ScaleJob:
            user, quota = access.user, access.quota
            return ScaleJob(job=job, replicas=replicas, stage=stage, unit=unit, user=user, quota=quota)

        return self._command("job.change", job, subjects.SCALE, message)

    def change_stage(self, job: str, sid: str, stage: int) -> Operation[Ack]:
        def message(access: AccessDecision) -> ChangeStage:
            return ChangeStage(job=job, sid=sid, stage=stage, user=access.user)

        return self._command("job.change", job, subjects.CHANGE_STAGE, message)

    def recut(
        self, job: str, plan: str | None, revision: int | None = None, *, dry_run: bool = False
    ) -> Operation[RecutAnswer]:
        """Cuts a running job's layers anew: as `plan` says, or None, as the planner does."""
        cuts = None if plan is None else cuts_of(plan)

        def message(access: AccessDecision) -> RecutJob:
            return RecutJob(job=job, user=access.user, cuts=cuts, revision=revision, dry_run=dry_run)

        return self._command("job.change", job, subjects.RECUT, message)

    def cancel(self, job: str, reason: str) -> Operation[JobRecord]:
        def message(access: AccessDecision) -> CancelJob:
            return CancelJob(job=job, user=access.user, reason=reason)

        return self._learning(self._command("job.cancel", job, subjects.CANCEL, message, frees=True))

    def park(self, job: str, reason: str) -> Operation[JobRecord]:
        def message(access: AccessDecision) -> ParkJob:
            return ParkJob(job=job, user=access.user, reason=reason)

        return self._learning(self._command("job.park", job, subjects.PARK, message, frees=True))

    def resume(
        self, job: str, stages: int | None = None, replicas: int | None = None
    ) -> Operation[JobRecord]:
        def message(access: AccessDecision) -> ResumeJob:
            user, quota = access.user, access.quota
            return ResumeJob(job=job, user=user, stages=stages, replicas=replicas, quota=quota)

        return self._learning(self._command("job.resume", job, subjects.RESUME, message))

    def prioritise(self, job: str, priority: int) -> Operation[JobRecord]:
        def message(access: AccessDecision) -> PrioritiseJob:
            return PrioritiseJob(job=job, user=access.user, priority=priority)

        return self._learning(self._command("job.change", job, subjects.PRIORITISE, message))

    def queue(self, job: str | None = None) -> Operation[QueueStatus]:
        """Who waits for slots, and why; of one job, when it is expected to start."""
        return self._backends.operation(
            "mesh.read", "mesh", subjects.QUEUE_QUERY, lambda _: QueueQuery(job=job), self.times.query_s
        )

    def plan(self, bearer: Bearer, question: PlanBody) -> Operation[PlanMade]:
        """A plan of a job that is not there yet.

        Where nobody has measured its model, a node runs that: then the user needs what a submission needs,
        and the job may name nothing that only a submitted one gets.
        """

        async def act(access: AccessDecision) -> PlanMade:
            asked = question.model_copy(update={"job": planned_job(question.job)})
            if question.model is None and question.like is None:
                await bearer.check("job.submit", question.job.name)
                spec = without_weights(unresolved(question.job))
                refuse_urls(spec)
                await self._let_read(bearer, spec, access.user)
                admitted = await self.code.admit(bearer, spec, access.user)
                guarded = bool(self._bus.keyring.of_kind(EntityKind.ORCHESTRATOR))
                refuse_for_analysis(admitted, guarded=guarded)
                asked = question.model_copy(update={"job": admitted})
            message = MakePlan(question=asked, user=access.user)
            return await self._backends.command(subjects.MAKE_PLAN, message, deadline_s=self.times.plan_s)

        return Operation("plan.make", question.job.name, act)

    def reservations(self) -> Operation[Reservations]:
        """The slots that are kept."""
        row, ask = subjects.RESERVATIONS_QUERY, lambda _: ReservationsQuery()
        return self._backends.operation("mesh.read", "mesh", row, ask, self.times.query_s)

    def reserve(self, spec: ReservationSpec) -> Operation[Reservations]:
        """Keeps slots for a user or job from one time until another; for operators."""
        return self._command(
            "node.reserve",
            spec.name,
            subjects.RESERVE_SLOTS,
            lambda access: ReserveSlots(spec=spec, by=access.user),
        )

    def cancel_reservation(self, name: str) -> Operation[Reservations]:
        return self._command(
            "node.reserve",
            name,
            subjects.CANCEL_RESERVATION,
            lambda access: CancelReservation(name=name, by=access.user),
        )

    def mesh(self) -> Operation[MeshStatus]:
        return self._backends.operation(
            "mesh.read", "mesh", subjects.MESH_QUERY, lambda _: MeshQuery(), self.times.query_s
        )

    def cordon(self, node: str, slot: int | None, reason: str, *, drain: bool = False) -> Operation[Cordons]:
        """Keeps new instances off a node or a slot; with `drain`, moves those that run there elsewhere."""

        def message(access: AccessDecision) -> CordonPlace:
            return CordonPlace(node=node, slot=slot, reason=reason, user=access.user, drain=drain)

        return self._command("node.drain" if drain else "node.cordon", node, subjects.CORDON_PLACE, message)

    def leave(self, node: str, deadline_s: float, reason: str, source: LeaveSource) -> Operation[Cordons]:
        """Has a node leave: its instances move by the deadline, and then its agent ends."""

        def message(access: AccessDecision) -> LeaveNotice:
            return LeaveNotice(node=node, deadline_s=deadline_s, source=source, reason=reason, by=access.user)

        return self._command("node.drain", node, subjects.LEAVE_NODE, message)

    def uncordon(self, node: str, slot: int | None) -> Operation[Cordons]:
        def message(access: AccessDecision) -> UncordonPlace:
            return UncordonPlace(node=node, slot=slot, user=access.user)

        return self._command("node.uncordon", node, subjects.UNCORDON_PLACE, message)

    def faults(self, job: str | None) -> Operation[FaultList]:
        """The last record of each fault, from the queue's stream. `job` None: of all jobs and the mesh."""

        async def act(_: AccessDecision) -> FaultList:
            last: dict[str, FaultRecord] = {}
            tokens: dict[str, Any] = {} if job is None else {"job": job}
            async for recorded in self._bus.history(subjects.FAULT_RECORD, **tokens):
                if isinstance(recorded.message, FaultRecord):
                    last[recorded.message.id] = recorded.message
            return FaultList(faults=tuple(sorted(last.values(), key=lambda fault: fault.opened_at)))

        return Operation("fault.read", job or "faults", act)

    def _command(
        self,
        action: str,
        resource: str,
        row: Subject[Request, Reply],
        message: Callable[[AccessDecision], Request],
        *,
        frees: bool = False,
    ) -> Operation[Reply]:
        return self._backends.operation(action, resource, row, message, self.times.command_s, frees=frees)

    def _learning(self, command: Operation[JobRecord]) -> Operation[JobRecord]:
        """The command; this gateway's own reads show its answer at once."""

        async def act(access: AccessDecision) -> JobRecord:
            record = await command.act(access)
            self.cache.take(record)
            return record

        return replace(command, act=act)

    async def all_records(self) -> JobList:
        """The records of all jobs."""
        if self.cache.current.is_set():
            return JobList(jobs=self.cache.all())
        return await self._query(None)

    async def asked_records(self) -> JobList:
        """All records, as the orchestrator has them."""
        return await self._query(None)

    async def _query(self, job: str | None) -> JobList:
        return await self._backends.command(subjects.QUERY, JobQuery(job=job), deadline_s=self.times.query_s)
