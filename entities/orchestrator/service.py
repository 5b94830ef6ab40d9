"""The orchestrator's service: registrations, submissions, the queue, each message's way to its job."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.presence import Presence
from bus.services import Subscription
from entities.orchestrator.arbitration import (
    ArbitrationConfig,
    ArbitrationState,
    JobFacts,
    arbitrate,
    forget_job,
    lapse,
    register,
)
from entities.orchestrator.job_run import JobRun
from entities.orchestrator.journal import Journal
from entities.orchestrator.mesh_view import MeshView
from schemas.cluster import AnalysisFailed, NodeStatus, SampleWritten
from schemas.door import CancelJob, JobList, JobQuery, JobSummary, MeshQuery, MeshStatus, SubmitJob
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, Conflict, DmscError, NotFound
from schemas.fault import FaultReport
from schemas.job import ENDED, JobRecord, JobState
from schemas.policy import ModuleLifecycle, PolicyDecision, PolicySuggestion
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from schemas.signals import NodeRegistration, QosReport, TerminationReport
from schemas.step import MicrobatchClaim
from schemas.task_graph import ModelTopology, Placement

log = get_logger("orchestrator")

LAPSE_EVERY_S = 1.0
"""How often adopted suggestions are checked for having lapsed."""


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    """Settings of the orchestrator.

    `ended_kept` bounds how many ended jobs stay in memory for listings; the bucket keeps all.
    `submissions_kept` bounds how many submissions are remembered, so that a client's command that was
    repeated through another gateway is the same job; clients give up after a minute.
    """

    sid: str = "orchestrator"
    node: str = "mesh"
    ended_kept: int = 1000
    submissions_kept: int = 4096
    arbitration: ArbitrationConfig = field(default_factory=ArbitrationConfig)


class Orchestrator:
    """SMO (draft §3): one leads; jobs run as tasks, each with its own state."""

    def __init__(self, bus: Bus, config: OrchestratorConfig = OrchestratorConfig()) -> None:
        self._bus = bus
        self.config = config
        self.mesh = MeshView()
        self._runs: dict[str, JobRun] = {}
        self._ended: dict[str, JobRecord] = {}
        self._submitted: OrderedDict[tuple[str, str], asyncio.Future[JobRecord]] = OrderedDict()
        self._arbitration = ArbitrationState()
        self._tasks: asyncio.TaskGroup | None = None
        self._revising = asyncio.Lock()

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serves until cancelled. Running jobs keep their record, so that the next start resumes them."""
        record = ServiceRecord(
            sid=self.config.sid,
            prefix="entity/orchestrator",
            kind=EntityKind.ORCHESTRATOR,
            incarnation=self._bus.sender.incarnation,
            state=InstanceState.ACTIVE,
            endpoint=Endpoint(cluster="mesh", node=self.config.node),
        )
        async with contextlib.AsyncExitStack() as stack:
            watch = await self._bus.bucket(subjects.REGISTRY_RECORD).watch(self.mesh.record)
            stack.push_async_callback(watch.stop)
            await stack.enter_async_context(Presence(self._bus, record))
            async with asyncio.TaskGroup() as self._tasks:
                served = await self._serve()
                self._tasks.create_task(self._lapses())
                await self._resume()
                if ready is not None:
                    ready.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.gather(*(run.shut_down() for run in list(self._runs.values())))
                    for subscription in served:
                        await subscription.stop()

    async def _serve(self) -> list[Subscription]:
        bus = self._bus
        return [
            await bus.serve(subjects.MESH_REGISTRATION, self._register),
            await bus.serve(subjects.NODE_STATUS, self._node),
            await bus.serve(subjects.TOPOLOGY, self._topology),
            await bus.serve(subjects.ANALYSIS_FAILED, self._analysis_failed),
            await bus.serve(subjects.SAMPLE_WRITTEN, self._sample_written),
            await bus.serve(subjects.FAULT_REPORT, self._fault),
            await bus.serve(subjects.MODULE_LIFECYCLE, self._lifecycle),
            await bus.serve(subjects.SUBMIT, self._submit),
            await bus.serve(subjects.CANCEL, self._cancel),
            await bus.serve(subjects.QUERY, self._query),
            await bus.serve(subjects.MESH_QUERY, self._mesh_query),
            await bus.subscribe(subjects.STEP_CLAIM, self._claim),
            await bus.subscribe(subjects.TERMINATION, self._termination),
            await bus.subscribe(subjects.QOS_REPORT, self._quality),
            await bus.subscribe(subjects.SUGGESTION, self._suggestion),
        ]

    # --- the mesh ---------------------------------------------------------------------------------------
    async def _register(self, message: NodeRegistration, envelope: Envelope) -> Ack:
        known = self.mesh.services.get(message.sid)
        await self.mesh.service(message)
        if known is None or known.incarnation != message.incarnation:
            for run in list(self._runs.values()):  # it has started again and knows no policy
                if run.communication.policy is not None:
                    self._spawn(self._bring_policy(run, message.sid))
        return Ack()

    async def _bring_policy(self, run: JobRun, sid: str) -> None:
        try:
            await run.communication.send_to(sid)
        except DmscError as error:
            log.warning("policy not acknowledged", job=run.job, sid=sid, reason=str(error))

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
            )
            for record in self._records()
        )
        return MeshStatus(
            services=tuple(sorted(self.mesh.records.values(), key=lambda record: (record.kind, record.sid))),
            nodes=tuple(self.mesh.nodes[sid] for sid in sorted(self.mesh.nodes)),
            jobs=jobs,
            quality=tuple(self.mesh.quality[key] for key in sorted(self.mesh.quality)),
        )

    # --- jobs -------------------------------------------------------------------------------------------
    async def _submit(self, message: SubmitJob, envelope: Envelope) -> JobRecord:
        """`causation` is the client's own command, where it came by the bus: once heard, one job."""
        if envelope.causation is None:
            return await self._queue(message)
        command = (message.user, envelope.causation)
        if command in self._submitted:
            return await asyncio.shield(self._submitted[command])
        promise = self._submitted[command] = asyncio.get_running_loop().create_future()
        while len(self._submitted) > self.config.submissions_kept:
            self._submitted.popitem(last=False)
        try:
            record = await self._queue(message)
        except BaseException:  # it did not become a job: a repetition may
            self._submitted.pop(command, None)
            promise.cancel()
            raise
        promise.set_result(record)
        return record

    async def _queue(self, message: SubmitJob) -> JobRecord:
        now = time.time()
        record = JobRecord(
            job=f"j{secrets.token_hex(3)}",
            spec=message.spec,
            state=JobState.QUEUED,
            user=message.user,
            submitted_at=now,
            changed_at=now,
        )
        return await self._start(record, message.gateway, "submitted")

    async def _start(self, record: JobRecord, gateway: str, reason: str) -> JobRecord:
        journal = Journal(self._bus, record.model_copy(update={"epoch": record.epoch + 1}))
        run = JobRun(self._bus, self.mesh, journal, gateway, self._occupied)
        self._runs[record.job] = run
        await journal.move(JobState.QUEUED, reason)
        self._spawn(self._drive(run))
        return journal.record

    async def _drive(self, run: JobRun) -> None:
        try:
            await run.run()
        finally:
            del self._runs[run.job]
            self._ended[run.job] = run.journal.record
            while len(self._ended) > self.config.ended_kept:
                del self._ended[next(iter(self._ended))]
            self._arbitration = forget_job(self._arbitration, run.job)
            self.mesh.forget_job(run.job)

    async def _resume(self) -> None:
        """Jobs that an earlier orchestrator left open start again: new epoch, from their checkpoint."""
        entries = await self._bus.bucket(subjects.JOB_RECORD).entries()
        for entry in sorted(entries, key=lambda entry: entry.message.submitted_at):
            record = entry.message
            if record.state in ENDED:
                self._ended[record.job] = record
            else:
                await self._start(record, "", f"the orchestrator started again while it was {record.state}")

    def _occupied(self, job: str) -> dict[str, list[Placement]]:
        """Slots promised to the other jobs, by node agent."""
        taken: dict[str, list[Placement]] = defaultdict(list)
        for run in self._runs.values():
            if run.job == job or run.instances.graph is None:
                continue
            for place in run.instances.graph.placements:
                agent = self.mesh.agent_of(place.cluster, place.node)
                if agent is not None and place.slot >= 0:
                    taken[agent].append(place)
        return taken

    async def _cancel(self, message: CancelJob, envelope: Envelope) -> JobRecord:
        run = self._runs.get(message.job)
        if run is None:
            record = self._ended.get(message.job)
            if record is None:
                raise NotFound(f"no job {message.job}: `dmsc jobs` lists them")
            raise Conflict(f"job {message.job} has already ended: {record.state}")
        if run.over:
            raise Conflict(f"job {message.job} is ending: {run.journal.record.state}")
        run.cancel(message.reason or f"cancelled by {message.user}")
        return run.journal.record

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
            run.topology(message)
        return Ack()

    async def _analysis_failed(self, message: AnalysisFailed, envelope: Envelope) -> Ack:
        if run := self._runs.get(message.job):
            run.analysis_failed(message)
        return Ack()

    async def _sample_written(self, message: SampleWritten, envelope: Envelope) -> Ack:
        if run := self._runs.get(message.job):
            run.sample_written(message)
        return Ack()

    async def _claim(self, message: MicrobatchClaim, envelope: Envelope) -> None:
        if run := self._runs.get(message.job):
            run.claimed(message)

    async def _termination(self, message: TerminationReport, envelope: Envelope) -> None:
        if run := self._runs.get(message.job):
            run.terminated(message)

    async def _fault(self, message: FaultReport, envelope: Envelope) -> Ack:
        run = self._runs.get(message.job) if message.job else None
        if run is not None:
            self._spawn(run.fault(message))
        return Ack(note="taken up" if run else "no such job runs")

    async def _quality(self, message: QosReport, envelope: Envelope) -> None:
        if message.job in self._runs:
            self.mesh.report(message)

    # --- functional modules -----------------------------------------------------------------------------
    async def _lifecycle(self, message: ModuleLifecycle, envelope: Envelope) -> Ack:
        self._arbitration = register(self._arbitration, message, time.monotonic())
        return Ack()

    async def _suggestion(self, message: PolicySuggestion, envelope: Envelope) -> None:
        async with self._revising:
            run = self._runs.get(message.job)
            facts = self._facts(run) if run is not None else None
            outcome, self._arbitration = arbitrate(
                self._arbitration, message, facts, time.monotonic(), config=self.config.arbitration
            )
            revision = None
            if (
                outcome.adopted
                and run is not None
                and outcome.stage is not None
                and outcome.weights is not None
            ):
                revision = await run.communication.revise(
                    f"{message.module}: {message.reason}", weights=(outcome.stage, outcome.weights)
                )
                await run.journal.tell("policy", text=f"{message.module} {message.version}: {outcome.reason}")
        if outcome.answer:
            decision = PolicyDecision(
                module=message.module,
                version=message.version,
                job=message.job,
                suggestion=envelope.id,
                adopted=outcome.adopted,
                reason=outcome.reason,
                policy_revision=revision,
            )
            await self._bus.publish(subjects.POLICY_DECISION, decision, cause=envelope, module=message.module)

    def _facts(self, run: JobRun) -> JobFacts | None:
        policy = run.communication.policy
        if policy is None or policy.ended or run.instances.graph is None:
            return None
        return JobFacts(
            active={
                stage: [member.sid for member in members if member not in run.instances.lost]
                for stage, members in enumerate(run.instances.stages())
            },
            weights=run.communication.weights(),
            revision=policy.revision,
            step=run.step,
        )

    async def _lapses(self) -> None:
        while True:
            await asyncio.sleep(LAPSE_EVERY_S)
            async with self._revising:
                facts = {
                    job: held for job, run in self._runs.items() if (held := self._facts(run)) is not None
                }
                lapses, self._arbitration = lapse(self._arbitration, facts, time.monotonic())
                for one in lapses:
                    run = self._runs.get(one.job)
                    if run is None:
                        continue
                    try:
                        await run.communication.revise(one.reason, weights=(one.stage, one.weights))
                        await run.journal.tell("policy", text=one.reason)
                    except DmscError as error:
                        log.warning("lapse not carried out", job=one.job, reason=str(error))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(self._contained(work))

    async def _contained(self, work: Coroutine[None, None, None]) -> None:
        """One job's trouble must not end the service: a TaskGroup would take all down with it."""
        try:
            await work
        except DmscError as error:
            log.error("orchestrator task failed", reason=str(error))
        except Exception as error:
            log.error("orchestrator task failed", exc_info=error)
