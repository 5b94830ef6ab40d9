"""The leading orchestrator: serves registrations and submissions, and hands each message to its job."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.resealing import Resealing
from bus.messaging.handlers import Handler, Server, Subscription
from bus.messaging.key_value import KeyValueEntry
from bus.subject import Subject
from bus.wire.correlation import current, new_correlation
from bus.wire.packed import Sendable
from entities import metrics
from entities.election.leadership import LeaderCandidate
from entities.election.lease import LeadershipLeaseConfig
from entities.orchestrator.faults.fault_queue import FaultQueue
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.job.unreadable_records import RecordGuards, above_all
from entities.orchestrator.job_state.job_secrets import seal_secrets_anew
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.link_secret import seal_links_anew
from entities.orchestrator.job_state.retry_limits import Parked
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.nodes.cordon_service import CordonService
from entities.orchestrator.nodes.draining import Draining
from entities.orchestrator.policy.arbitration import ArbitrationConfig
from entities.orchestrator.policy.policy_service import PolicyService
from entities.orchestrator.policy.promotion_rules import PromotionConfig
from entities.orchestrator.policy.promotion_service import PromotionService
from entities.orchestrator.queue.admission import JobAdmission
from entities.orchestrator.queue.slot_demand import SlotDemand
from schemas import names
from schemas.base import Message
from schemas.cluster import AnalysisFailed, NodeStatus, SampleWritten
from schemas.door import (
    CancelJob,
    ChangeStage,
    JobList,
    JobQuery,
    JobSummary,
    MeshQuery,
    MeshStatus,
    ParkJob,
    ResumeJob,
    ScaleJob,
    SubmitJob,
)
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, Conflict, DmscError, Fenced, NewerRecord, NotFound, Unavailable
from schemas.fault import FaultReport
from schemas.job import ENDED, JobRecord, JobState
from schemas.policy import DirectModule, ModuleLifecycle, ModuleOp
from schemas.registry import ServiceRecord
from schemas.signals import NodeRegistration, QosReport, TerminationReport
from schemas.step import MicrobatchClaim
from schemas.task_graph import ModelTopology

log = get_logger("orchestrator")

RETRY_S = 0.2
"""Pause before a new leader asks the bus again for the state that it needs."""

CONFIRM_S = 2.0
"""How long a command that ends a job's work waits for the confirmation that this orchestrator leads."""

_Result = TypeVar("_Result")


class _Deposed(Exception):
    """Ends the task group of this term."""


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    """Settings of the orchestrator. `sid` is the leader's; a standby's SID contains its incarnation as well.

    `ended_kept` bounds how many ended jobs stay in memory for listings; the bucket keeps all of them.
    `submissions_kept` bounds how many submissions are remembered: a command that a client repeats through
    another gateway then yields the same job. Clients give up after a minute.
    """

    sid: str = "orchestrator"
    node: str = "mesh"
    ended_kept: int = 1000
    submissions_kept: int = 4096
    peak_tflops: float | None = None  # of one device, 10¹² FLOP/s, for MFU among the metrics; None: unknown
    lease: LeadershipLeaseConfig = field(default_factory=LeadershipLeaseConfig)
    arbitration: ArbitrationConfig = field(default_factory=ArbitrationConfig)
    promotion: PromotionConfig = field(default_factory=PromotionConfig)


class Leader:
    """The orchestrator during one term. Each job runs as a task with its own state; none outlives the term.

    `known`: the jobs of an earlier term of this process; a job whose record was lost goes on from it.
    """

    def __init__(
        self,
        bus: Bus,
        mesh: MeshView,
        candidate: LeaderCandidate,
        config: OrchestratorConfig,
        known: Mapping[str, JobRecord],
    ) -> None:
        self._bus = bus
        self._candidate = candidate
        self.config = config
        self.mesh = mesh
        self.faults = FaultQueue(bus)
        self._cordoning = CordonService(bus, self.mesh, self.faults)
        self._draining = Draining(self.mesh, self._cordoning, lambda: self._runs, candidate.confirmed)
        self._runs: dict[str, JobRun] = {}
        self._room = SlotDemand(mesh, self._runs)
        self._ended: dict[str, JobRecord] = {}
        self._admission = JobAdmission(lambda: [run.as_it_stands() for run in self._runs.values()])
        self._submitted: OrderedDict[tuple[str, str], asyncio.Future[JobRecord]] = OrderedDict()
        self._policies = PolicyService(
            bus, self._runs, self.mesh.runs, candidate.confirmed, config.arbitration
        )
        self._promotions = PromotionService(
            bus, self._policies, self._runs, candidate.confirmed, config.promotion
        )
        self._guards = RecordGuards(bus, self._runs, self._ended)
        seals = (partial(seal_secrets_anew, bus), partial(seal_links_anew, bus))
        self._sealing = Resealing(bus, EntityKind.ORCHESTRATOR, *seals)
        self._former_records = known
        self._tasks: asyncio.TaskGroup | None = None
        self.refused: NewerRecord | None = None  # why it does not lead: newer records are never overwritten
        self._refusing = asyncio.Event()

    def records(self) -> dict[str, JobRecord]:
        """The records of all jobs that are known here, by id."""
        return {record.job: record for record in self._records()}

    async def run(self, lease_task: asyncio.Task[str], on_serving: Callable[[], Awaitable[None]]) -> str:
        """Leads until `lease_task` ends; returns why. Calls `on_serving` once all subjects are served.

        When cancelled, it stops in order: running jobs keep their record, so that the next leader resumes
        them. When deposed, it stops at once and touches neither records nor instances: both belong to the
        next leader.
        """
        subscriptions: list[Subscription] = []
        deposed: str | None = None
        try:
            async with asyncio.TaskGroup() as self._tasks:
                leader_task = self._tasks.create_task(self._lead(subscriptions, on_serving))
                refusal_task = self._tasks.create_task(self._refusing.wait())
                try:
                    await asyncio.wait(
                        {lease_task, leader_task, refusal_task}, return_when=asyncio.FIRST_COMPLETED
                    )
                    if leader_task.done() and not lease_task.done():
                        leader_task.result()  # it ends only by an error, or because it refuses to lead
                    deposed = self.refused.text if self.refused is not None else lease_task.result()
                finally:
                    self._sealing.stop()
                    await self._stop(subscriptions, deposed is not None)
                raise _Deposed
        except* _Deposed:
            pass
        assert deposed is not None
        return deposed

    async def _lead(
        self, subscriptions: list[Subscription], on_serving: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            await self._serve_term(subscriptions, on_serving)
        except NewerRecord as error:
            self._refuse(error)

    def _refuse(self, error: NewerRecord) -> None:
        """Ends the term: a record of a newer version can be neither read nor overwritten here."""
        self.refused = self.refused or error
        self._refusing.set()

    async def _serve_term(
        self, subscriptions: list[Subscription], on_serving: Callable[[], Awaitable[None]]
    ) -> None:
        assert self._tasks is not None
        loads = (self._cordoning.load, self._policies.load, self._promotions.load)
        for load in (*loads, self._sealing.start):
            await self._retry(load)
        await self._resume()
        self._tasks.create_task(self.faults.run(set(self._runs)), name="fault queue")
        await self._serve(subscriptions)
        self.mesh.on_leaving = self._leaving
        await self._retry(self._guards.start)
        await on_serving()
        self._tasks.create_task(self._draining.run(), name="draining")
        self._tasks.create_task(self._policies.orders(), name="module orders")
        self._tasks.create_task(self._promotions.run(), name="promotions")
        await self._policies.lapses()

    async def _stop(self, subscriptions: list[Subscription], deposed: bool) -> None:
        self.mesh.on_leaving = lambda record: None
        if deposed:
            for run in self._runs.values():
                run.instances.members.clear()  # they belong to the next leader: not ours to stop
        await asyncio.gather(*(run.shut_down(deposed=deposed) for run in list(self._runs.values())))
        await self._guards.stop()
        for subscription in subscriptions:
            await subscription.stop(drain=not deposed)
        if not deposed:
            await self._policies.keep()

    async def _serve(self, subscriptions: list[Subscription]) -> None:
        """Subscribes to all requests and events; adds each subscription to `subscriptions` at once."""
        bus = self._bus
        requests: tuple[tuple[Subject, Server], ...] = (
            (subjects.MESH_REGISTRATION, self._register),
            (subjects.NODE_STATUS, self._node),
            (subjects.TOPOLOGY, self._topology),
            (subjects.ANALYSIS_FAILED, self._analysis_failed),
            (subjects.SAMPLE_WRITTEN, self._sample_written),
            (subjects.FAULT_REPORT, self._fault),
            (subjects.MODULE_LIFECYCLE, self._policies.lifecycle),
            (subjects.DIRECT_MODULE, self._direct),
            (subjects.PROMOTE_MODULE, self._promotions.promote),
            (subjects.ROLL_BACK_MODULE, self._promotions.roll_back),
            (subjects.MODULE_QUERY, self._policies.query),
            (subjects.SUBMIT, self._submit),
            (subjects.RESUME, self._unpark),
            (subjects.SCALE, self._scale),
            (subjects.CHANGE_STAGE, self._change_stage),
            (subjects.QUERY, self._query),
            (subjects.MESH_QUERY, self._mesh_query),
            (subjects.CORDON_PLACE, self._cordoning.cordon),
            (subjects.UNCORDON_PLACE, self._cordoning.uncordon),
        )
        for row, server in requests:
            subscriptions.append(await self._retry(partial(bus.serve, row, self._once_confirmed(server))))
        for row, server in ((subjects.CANCEL, self._cancel), (subjects.PARK, self._park)):
            subscriptions.append(await self._retry(partial(bus.serve, row, self._even_unconfirmed(server))))
        events: tuple[tuple[Subject, Handler], ...] = (
            (subjects.STEP_CLAIM, self._claim),
            (subjects.TERMINATION, self._termination),
            (subjects.QOS_REPORT, self._quality),
            (subjects.SUGGESTION, self._policies.suggestion),
            (subjects.POLICY_SCORE, self._promotions.score),
        )
        for row, handler in events:
            subscriptions.append(await self._retry(partial(bus.subscribe, row, handler)))

    def _once_confirmed(self, server: Server) -> Server:
        """Answers only once it is confirmed that this orchestrator leads: it may have been frozen."""

        async def confirmed_answer(message: Message, envelope: Envelope) -> Sendable:
            await self._candidate.confirmed()
            return await server(message, envelope)

        return confirmed_answer

    def _even_unconfirmed(self, server: Server) -> Server:
        """Answers commands that end a job's work even while the lead can't be confirmed (no bus, no writes).

        The job's record decides later, once it can be written, whether this orchestrator was allowed to.
        """

        async def answer(message: Message, envelope: Envelope) -> Sendable:
            with suppress(TimeoutError):
                async with asyncio.timeout(CONFIRM_S):
                    await self._candidate.confirmed()
            try:
                return await server(message, envelope)
            except NewerRecord as error:
                self._refuse(error)
                raise

        return answer

    # --- the mesh ---------------------------------------------------------------------------------------
    async def _register(self, message: NodeRegistration, envelope: Envelope) -> Ack:
        before = self.mesh.services.get(message.sid)
        await self.mesh.service(message)
        if before is None or before.incarnation != message.incarnation:
            for run in self._runs.values():  # the service has restarted and knows no policy
                run.communication.bring(message.sid)
        return Ack()

    async def _node(self, message: NodeStatus, envelope: Envelope) -> Ack:
        await self.mesh.node(message)
        return Ack()

    async def _mesh_query(self, message: MeshQuery, envelope: Envelope) -> MeshStatus:
        jobs = tuple(
            JobSummary(
                job=record.job,
                name=record.spec.name,
                state=record.state,
                step=record.step,
                steps=record.spec.training.steps,
                reason=record.reason,
                alerts=self._runs[record.job].training.alerts.raised if record.job in self._runs else (),
            )
            for record in self._records()
        )
        return MeshStatus(
            services=tuple(sorted(self.mesh.records.values(), key=lambda record: (record.kind, record.sid))),
            nodes=tuple(self.mesh.nodes[sid] for sid in sorted(self.mesh.nodes)),
            jobs=jobs,
            cordons=self.mesh.cordons.active(),
            quality=tuple(self.mesh.quality[key] for key in sorted(self.mesh.quality)),
            unreadable=self._guards.notes(),
        )

    async def _direct(self, message: DirectModule, envelope: Envelope) -> ModuleLifecycle:
        """Passes on an operator's order; an order about which version is active ends a promotion."""
        if message.op in (ModuleOp.ACTIVATE, ModuleOp.SHADOW):
            await self._promotions.forget(message.module)
        return await self._policies.direct(message, envelope)

    # --- jobs -------------------------------------------------------------------------------------------
    async def _submit(self, message: SubmitJob, envelope: Envelope) -> JobRecord:
        """Queues a job once per command; `causation` is the client's own command where it came by the bus.

        This also holds if an earlier leader queued the job and could not answer: the record has the command.
        """
        command = envelope.causation or envelope.id
        key = (message.user, command)
        if key in self._submitted:
            return await asyncio.shield(self._submitted[key])
        promise = self._remember(key)
        try:
            record = await self._queue(message, command)
        except BaseException as error:  # no job was queued: a repetition of the command may succeed
            self._submitted.pop(key, None)
            if isinstance(error, DmscError):
                promise.set_exception(error)
                promise.exception()  # seen, even if nobody repeated it meanwhile
            else:
                promise.cancel()
            raise
        promise.set_result(record)
        return record

    def _remember(self, key: tuple[str, str]) -> asyncio.Future[JobRecord]:
        promise: asyncio.Future[JobRecord] = asyncio.get_running_loop().create_future()
        self._submitted[key] = promise
        while len(self._submitted) > self.config.submissions_kept:
            self._submitted.popitem(last=False)
        return promise

    async def _queue(self, message: SubmitJob, command: str) -> JobRecord:
        """Queues a job if the quota allows it.

        Raises:
            OverQuota: the user has as many jobs or slots as the quota allows.
        """
        async with self._admission.turn:  # the next admission must count this job, too
            self._admission.submission(message)
            return await self._queued(message, command)

    async def _queued(self, message: SubmitJob, command: str) -> JobRecord:
        names.refuse_taken("job", message.spec.name)
        now = time.time()
        record = JobRecord(
            job=f"j{secrets.token_hex(3)}",
            spec=message.spec,
            state=JobState.QUEUED,
            user=message.user,
            may_read=message.may_read,
            command=command,
            correlation=current() or new_correlation(),
            caller_span=message.caller_span,
            submitted_at=now,
            changed_at=now,
        )
        return await self._start(record, 0, message.gateway, "submitted")

    async def _start(self, record: JobRecord, revision: int, gateway: str, reason: str) -> JobRecord:
        """Starts a run of the job in a new epoch; its first write fences the former orchestrator.

        Raises:
            Fenced: the record is no longer the one of `revision`.
        """
        fresh = record.model_copy(update={"epoch": record.epoch + 1})
        journal = JobStore(self._bus, fresh, revision, self._candidate.confirmed)
        run = self._new_run(journal, gateway)
        # a job that was ending only has to be cleaned up, and a parked one keeps waiting
        stays = record.ends_as is not None or record.state is JobState.PARKED
        await journal.move(record.state if stays else JobState.QUEUED, record.reason if stays else reason)
        self._runs[record.job] = run
        self._spawn(self._drive(run))
        return journal.record

    def _new_run(self, journal: JobStore, gateway: str, parked: Parked | None = None) -> JobRun:
        return JobRun(self._bus, self.mesh, journal, gateway, self._room, self.faults, parked)

    async def _drive(self, run: JobRun) -> None:
        """Drives a job to its end; a parked job gets a new run in the next epoch."""
        try:
            while True:
                await run.run()
                if run.parked is None:
                    return
                await self.mesh.nudge()  # other jobs may use its slots now
                journal, before = run.journal, None if run.parking.resumed else run.parked
                journal.begin_epoch()
                run = self._runs[run.job] = self._new_run(journal, run.entry.sid, before)
                await journal.move(JobState.PARKED, journal.record.reason)
        finally:
            del self._runs[run.job]
            await self.mesh.nudge()  # jobs that wait behind it try again
            self._ended[run.job] = run.journal.record
            while len(self._ended) > self.config.ended_kept:
                del self._ended[next(iter(self._ended))]
            self._policies.forget(run.job)
            self.mesh.forget_job(run.job)

    async def _resume(self) -> None:
        """Takes up the jobs that an earlier leader left open, each in a new epoch."""
        bucket = self._bus.bucket(subjects.JOB_RECORD)
        entries = await self._retry(partial(bucket.entries, strict=True))
        # Each job reads its own decision later; a decision of a newer version must end the term before that.
        await self._retry(partial(self._bus.bucket(subjects.STEP_DECISION).entries, strict=True))
        records = {entry.message.job: (above_all(entry), entry.revision) for entry in entries}
        for job in self._former_records.keys() - records.keys():
            log.error("job record lost: it goes on as it was known here", job=job)
            records[job] = (self._former_records[job], 0)
        for record, revision in sorted(records.values(), key=lambda entry: entry[0].submitted_at):
            if record.command:
                self._remember((record.user, record.command)).set_result(record)
            await self._resume_one(record, revision)

    async def _resume_one(self, record: JobRecord, revision: int) -> None:
        """Takes up one job. The former leader may write until the record holds our epoch, hence the loop."""
        while True:
            if record.state in ENDED:
                self._ended[record.job] = record
                return
            try:
                await self._start(record, revision, "", f"term {self._candidate.term}: found {record.state}")
                return
            except (Fenced, Unavailable) as error:
                log.info("job not taken over yet", job=record.job, reason=error.text)
            fresh = await self._retry(partial(self._read, record.job))
            if fresh is None:
                return
            record, revision = above_all(fresh), fresh.revision

    async def _read(self, job: str) -> KeyValueEntry | None:
        return await self._bus.bucket(subjects.JOB_RECORD).get(leader=True, job=job)

    async def _retry(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Repeats `work`, without which this orchestrator can't lead, until the bus is back."""
        while True:
            try:
                return await work()
            except Unavailable as error:
                log.warning("taking over waits for the bus", reason=error.text)
                await asyncio.sleep(RETRY_S)

    def _running(self, job: str) -> JobRun:
        if (run := self._runs.get(job)) is None:
            raise NotFound(f"no job {job} runs: `dmsc jobs` lists them")
        return run

    async def _scale(self, message: ScaleJob, envelope: Envelope) -> Ack:
        async with self._admission.turn:  # a job that is just being submitted counts, too
            run = self._running(message.job)
            self._admission.scaling(message, run.as_it_stands())
            return Ack(note=run.scale(message.stage, message.replicas))

    async def _change_stage(self, message: ChangeStage, envelope: Envelope) -> Ack:
        return Ack(note=self._running(message.job).move(message.sid, message.stage, message.user))

    async def _cancel(self, message: CancelJob, envelope: Envelope) -> JobRecord:
        run = self._unended(message.job)
        await run.cancel(message.reason or f"cancelled by {message.user}")
        return run.journal.record

    async def _park(self, message: ParkJob, envelope: Envelope) -> JobRecord:
        run = self._unended(message.job)
        await run.parking.park(f"parked by {message.user}{message.reason and f': {message.reason}'}")
        return run.journal.record

    async def _unpark(self, message: ResumeJob, envelope: Envelope) -> JobRecord:
        run = self._unended(message.job)
        await run.parking.resume(f"resumed by {message.user}")
        return run.journal.record

    def _unended(self, job: str) -> JobRun:
        """The run of a job that has not ended; it may be waiting.

        Raises:
            NotFound: no such job is known.
            Conflict: the job has ended, or is ending.
        """
        run = self._runs.get(job)
        if run is None:
            record = self._ended.get(job)
            if record is None:
                raise NotFound(f"no job {job}: `dmsc jobs` lists them")
            raise Conflict(f"job {job} has already ended: {record.state}")
        if run.over:
            raise Conflict(f"job {job} is ending: {run.journal.record.state}")
        return run

    async def _query(self, message: JobQuery, envelope: Envelope) -> JobList:
        if message.job is None:
            return JobList(jobs=tuple(self._records()))
        run = self._runs.get(message.job)
        record = run.journal.record if run is not None else self._ended.get(message.job)
        if record is None:
            raise NotFound(f"no job {message.job}: `dmsc jobs` lists them")
        return JobList(jobs=(record,))

    def _records(self) -> list[JobRecord]:
        records = [*self._ended.values(), *(run.journal.record for run in self._runs.values())]
        return sorted(records, key=lambda record: record.submitted_at)

    # --- messages on their way to a job -----------------------------------------------------------------
    async def _topology(self, message: ModelTopology, envelope: Envelope) -> Ack:
        if run := self._runs.get(message.job):
            run.model_work.topology(message, envelope.sender.name)
        return Ack()

    async def _analysis_failed(self, message: AnalysisFailed, envelope: Envelope) -> Ack:
        if run := self._runs.get(message.job):
            run.model_work.analysis_failed(message, envelope.sender.name)
        return Ack()

    async def _sample_written(self, message: SampleWritten, envelope: Envelope) -> Ack:
        if run := self._runs.get(message.job):
            run.model_work.sample_written(message, envelope.sender.name)
        return Ack()

    async def _claim(self, message: MicrobatchClaim, envelope: Envelope) -> None:
        if run := self._runs.get(message.job):
            run.claimed(message)

    async def _termination(self, message: TerminationReport, envelope: Envelope) -> None:
        if run := self._runs.get(message.job):
            run.clean_up.terminated(message)

    async def _fault(self, message: FaultReport, envelope: Envelope) -> Ack:
        run = self._runs.get(message.job) if message.job else None
        if message.kind == "device":  # the reporter repeats a report that was not answered
            graph = run.instances.graph if run is not None else None
            placements = graph.placements if graph is not None else ()
            placement = next((place for place in placements if place.sid == message.sid), None)
            await self._cordoning.device(message, placement)
            return Ack(note="taken up")
        if run is not None:
            self._spawn(run.fault(message))
        return Ack(note="taken up" if run else "no such job runs")

    def _leaving(self, record: ServiceRecord) -> None:
        run = self._runs.get(record.job) if record.job else None
        if run is not None:
            self._spawn(run.leaving(record))

    async def _quality(self, message: QosReport, envelope: Envelope) -> None:
        if run := self._runs.get(message.job or ""):
            self.mesh.report(message)
            run.training.reported(message)

    def readings(self) -> Iterator[metrics.MetricReading]:
        """Metrics of the jobs that have not ended."""
        runs = list(self._runs.values())
        for state, count in Counter(run.journal.record.state for run in runs).items():
            yield metrics.JOBS(count, state=state)
        for run in runs:
            yield from run.training.readings(self.config.peak_tflops)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(self._contained(work))

    async def _contained(self, work: Coroutine[None, None, None]) -> None:
        """Logs the failure of one job's task: in a TaskGroup it would end the whole service."""
        try:
            await work
        except NewerRecord as error:
            self._refuse(error)
        except DmscError as error:
            log.error("orchestrator task failed", reason=str(error))
        except Exception as error:
            log.error("orchestrator task failed", exc_info=error)
