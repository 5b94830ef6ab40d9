"""The leading orchestrator: it serves registrations and submissions, and passes each message to its job."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.resealing import Resealing
from bus.messaging.handlers import Handler, Server, Subscription
from bus.subject_row import Subject
from bus.wire.packed import Sendable
from entities import metrics
from entities.election.leadership import LeaderCandidate
from entities.election.lease import LeadershipLeaseConfig
from entities.orchestrator.automation.budget_holds import BudgetHolds
from entities.orchestrator.automation.load_scaling import LoadScaling
from entities.orchestrator.automation.loop_service import OwnLoop
from entities.orchestrator.data_builds.builds import Builds, BuildsConfig
from entities.orchestrator.faults.fault_location import stall_of
from entities.orchestrator.faults.fault_queue import FaultQueue
from entities.orchestrator.job.job_runs import JobRuns
from entities.orchestrator.job.services.model_services import ModelServices
from entities.orchestrator.job.services.version_run import run_type
from entities.orchestrator.job.services.version_watch import VersionWatch
from entities.orchestrator.job.teardown import LeftInstances
from entities.orchestrator.job.term import TermContext, insistently
from entities.orchestrator.job.unreadable_records import RecordGuards
from entities.orchestrator.job_state.job_secrets import seal_secrets_anew
from entities.orchestrator.job_state.link_secret import seal_links_anew
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.nodes.cordon_service import CordonService
from entities.orchestrator.nodes.draining import Draining
from entities.orchestrator.planning.plan_requests import MeshNetwork
from entities.orchestrator.policy.arbitration import ArbitrationConfig
from entities.orchestrator.policy.automation_service import AutomationService
from entities.orchestrator.policy.faults_at_hand.fault_questions import FaultQuestions
from entities.orchestrator.policy.learnt_state_service import LearntStateService
from entities.orchestrator.policy.policy_service import PolicyService
from entities.orchestrator.policy.promotion_rules import PromotionConfig
from entities.orchestrator.policy.promotion_service import PromotionService
from entities.orchestrator.queue.capacity_signal import CapacitySignal, CapacitySignalConfig
from entities.orchestrator.queue.mesh_slots import queue_rules
from entities.orchestrator.queue.plan_service import PlanService
from entities.planner.planning_process import PlanningConfig
from entities.queue.queue_rules import QueueRules
from schemas.automation import Automation
from schemas.base import Message
from schemas.cluster import AnalysisFailed, NodeStatus, SampleWritten
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, DmscError, NewerRecord
from schemas.fault import ClusterReport, FaultReport
from schemas.gateway_api import JobSummary, MeshQuery, MeshStatus
from schemas.job import JobRecord
from schemas.policy import DirectModule, ModuleLifecycle, ModuleOp
from schemas.registry import ServiceRecord
from schemas.signals import NodeRegistration, QosReport, TerminationReport
from schemas.step import MicrobatchClaim
from schemas.task_graph import ModelTopology

log = get_logger("orchestrator")


class _Deposed(Exception):
    """Ends everything of this term's task group."""


@dataclass(frozen=True, kw_only=True)
class OrchestratorConfig:
    """Settings of the orchestrator. `sid` is the leader's; a standby's SID also has its incarnation.

    `ended_kept` bounds how many ended jobs stay in memory for listings; the bucket keeps all.
    `submissions_kept` bounds how many submissions are remembered, so that a client's command that was
    repeated through another gateway is the same job; clients give up after a minute.
    """

    sid: str = "orchestrator"
    node: str = "mesh"
    ended_kept: int = 1000
    submissions_kept: int = 4096
    peak_tflops: float | None = None  # of one device, 10¹² FLOP/s, for MFU among the metrics; None: unknown
    confirm_s: float = 2.0
    """How long a command that ends a job's work waits until it is known that this one leads."""
    lease: LeadershipLeaseConfig = field(default_factory=LeadershipLeaseConfig)
    automation: Automation = Automation.ACT  # the mesh's mode, until a person switches it
    own_loop: bool = True  # whether the orchestrator suggests changes itself, or only modules do
    arbitration: ArbitrationConfig = field(default_factory=ArbitrationConfig)
    promotion: PromotionConfig = field(default_factory=PromotionConfig)
    queue: QueueRules = field(default_factory=queue_rules)
    network: MeshNetwork = field(default_factory=MeshNetwork)
    builds: BuildsConfig = field(default_factory=BuildsConfig)
    planning: PlanningConfig = field(default_factory=PlanningConfig)
    capacity: CapacitySignalConfig = field(default_factory=CapacitySignalConfig)


class Leader:
    """The orchestrator of one term. Jobs run as tasks, each with its own state; all of it ends with the term.

    `former_records`: the jobs of an earlier term of this process; one that the store has lost goes on from
    there.
    """

    def __init__(
        self,
        bus: Bus,
        mesh: MeshView,
        candidate: LeaderCandidate,
        config: OrchestratorConfig,
        former_records: Mapping[str, JobRecord],
    ) -> None:
        self._bus = bus
        self._candidate = candidate
        self.config = config
        self.mesh = mesh
        self.faults = FaultQueue(bus)
        self._cordoning = CordonService(bus, self.mesh, self.faults)
        term = TermContext(
            bus=bus,
            mesh=mesh,
            faults=self.faults,
            candidate=candidate,
            ended_kept=config.ended_kept,
            submissions_kept=config.submissions_kept,
            spawn=self._spawn,
            planning=config.planning,
            queue_rules=config.queue,
            ask_modules=lambda *asked: self._fault_questions.ask(*asked),
        )
        self._claims = term.claims
        self._jobs = JobRuns(
            term,
            former_records,
            forget=lambda job: self._policies.forget(job),
            set_by_person=lambda *setting: self._policies.set_by_person(*setting),
            run_type=run_type,
        )
        self._services = ModelServices(term, self._jobs)
        self._builds = Builds(term, self._jobs, config.builds)
        self._runs = self._jobs.running
        self._plans = PlanService(
            bus, mesh, self._analysed, lambda: self._jobs.queue.occupied(""), planning=config.planning
        )
        self._budgets = BudgetHolds(bus, self._runs, self._jobs.queue.again)
        self._jobs.queue.used_up = self._budgets.reason
        self._draining = Draining(bus, mesh, self._cordoning, self._runs, candidate.confirmed)
        self._policies = PolicyService(
            bus, self._runs, mesh, self._jobs.queue, candidate.confirmed, config.arbitration, self._services
        )
        self._watch = VersionWatch(bus, self._services.services, self._policies.consider)
        self._learnt = LearntStateService(bus, self._policies.standings, self._policies.owner_of)
        self._fault_questions = FaultQuestions(
            bus, self._policies, self._runs, mesh, self._spawn, config.arbitration
        )
        self._automation = AutomationService(bus, mesh, self._runs, self._policies, config.automation)
        self._promotions = PromotionService(
            bus, self._policies, self._runs, candidate.confirmed, config.promotion
        )
        self._own_loop = OwnLoop(self._runs, mesh, self._jobs.queue, self._policies, candidate.confirmed)
        self._scaling = LoadScaling(bus, self._runs, candidate.confirmed)
        self._guards = RecordGuards(bus, self._runs, self._jobs.ended)
        seals = (partial(seal_secrets_anew, bus), partial(seal_links_anew, bus))
        self._sealing = Resealing(bus, EntityKind.ORCHESTRATOR, *seals)
        self._tasks: asyncio.TaskGroup | None = None
        self.refused: NewerRecord | None = None  # why it does not lead: it must not be overwritten
        self._refusal = asyncio.Event()

    def records(self) -> dict[str, JobRecord]:
        """The records of all jobs of the term, by id."""
        return {record.job: record for record in self._jobs.records()}

    async def run(self, lease_task: asyncio.Task[str], on_serving: Callable[[], Awaitable[None]]) -> str:
        """Leads until `lease_task` ends; returns its result, the reason. Calls `on_serving` once it serves.

        A cancelled leader stops in order: running jobs keep their record, so that the next leader resumes
        them. A deposed leader stops at once, and touches neither records nor instances: both are the next
        leader's.
        """
        subscriptions: list[Subscription] = []
        deposed: str | None = None
        try:
            async with asyncio.TaskGroup() as self._tasks:
                leading = self._tasks.create_task(self._lead(subscriptions, on_serving))
                refusal = self._tasks.create_task(self._refusal.wait())
                try:
                    await asyncio.wait({lease_task, leading, refusal}, return_when=asyncio.FIRST_COMPLETED)
                    if leading.done() and not lease_task.done():
                        leading.result()  # it ends only by an error, or because it refuses to lead
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
            await self._take_up(subscriptions, on_serving)
        except NewerRecord as error:
            self._refuse(error)

    def _refuse(self, error: NewerRecord) -> None:
        """Ends the term: a record of a newer version can neither be continued nor overwritten."""
        self.refused = self.refused or error
        self._refusal.set()

    async def _take_up(
        self, subscriptions: list[Subscription], on_serving: Callable[[], Awaitable[None]]
    ) -> None:
        """Reads what earlier leaders left, resumes their jobs, serves, and runs until cancelled."""
        assert self._tasks is not None
        loads = (self._cordoning.load, self._policies.load, self._promotions.load, self._automation.load)
        for load in (*loads, self._jobs.reservations.load, self._budgets.load, self._sealing.start):
            await insistently(load)
        queue = self._jobs.queue
        queue.taking_over = True
        self._tasks.create_task(queue.run(), name="queue")
        await self._builds.know_code()
        await self._jobs.resume()
        await self._builds.resume()
        await self._services.resume()
        await self._watch.resume()
        queue.taking_over = False
        queue.again()
        self._tasks.create_task(self.faults.run(set(self._runs)), name="fault queue")
        await self._serve(subscriptions)
        self.mesh.on_leaving = self._leaving
        await insistently(self._guards.start)
        await on_serving()
        signal = CapacitySignal(self._bus, queue, self.config.capacity)
        self._tasks.create_task(signal.run(), name="wanted capacity")
        left = LeftInstances(self._bus, self.mesh, self._jobs.ended, self._runs)
        self._tasks.create_task(left.run(), name="left instances")
        self._tasks.create_task(self._draining.run(), name="draining")
        self._tasks.create_task(self._budgets.run(), name="budgets")
        self._tasks.create_task(self._policies.orders(), name="module orders")
        self._tasks.create_task(self._promotions.run(), name="promotions")
        if self.config.own_loop:
            self._tasks.create_task(self._own_loop.run(), name="own loop")
        self._tasks.create_task(self._scaling.run(), name="scaling of versions")  # no module does that
        self._tasks.create_task(self._builds.sweep(), name="work of builds")
        self._tasks.create_task(self._services.run(), name="services")
        await self._policies.lapses()

    async def _stop(self, subscriptions: list[Subscription], deposed: bool) -> None:
        self.mesh.on_leaving = lambda record: None
        if deposed:
            for run in self._runs.values():
                run.job.instances.members.clear()  # the next leader stops them, or goes on with them
        runs = (run.shut_down(deposed=deposed) for run in list(self._runs.values()))
        await asyncio.gather(self._builds.shut_down(), *runs)
        await self._guards.stop()
        for subscription in subscriptions:
            await subscription.stop(drain=not deposed)
        if not deposed:
            await self._policies.keep()

    async def _serve(self, subscriptions: list[Subscription]) -> None:
        """Subscribes to requests and messages; adds each subscription to `subscriptions` at once."""
        bus = self._bus
        requests: tuple[tuple[Subject, Server], ...] = (
            (subjects.MESH_REGISTRATION, self._register),
            (subjects.NODE_STATUS, self._node),
            (subjects.NODE_LEAVES, self._cordoning.left),
            (subjects.TOPOLOGY, self._topology),
            (subjects.ANALYSIS_FAILED, self._analysis_failed),
            (subjects.SAMPLE_WRITTEN, self._sample_written),
            (subjects.FAULT_REPORT, self._fault),
            (subjects.CLUSTER_REPORT, self._judged),
            (subjects.MODULE_LIFECYCLE, self._policies.lifecycle),
            (subjects.DIRECT_MODULE, self._direct),
            (subjects.PROMOTE_MODULE, self._promotions.promote),
            (subjects.ROLL_BACK_MODULE, self._promotions.roll_back),
            (subjects.MODULE_QUERY, self._policies.query),
            (subjects.LEARNT_QUERY, self._learnt.query),
            (subjects.KEEP_LEARNT, self._learnt.keep),
            (subjects.DIRECT_LEARNT, self._learnt.direct),
            (subjects.SWITCH_AUTOMATION, self._automation.switch),
            (subjects.AUTOMATION_QUERY, self._automation.query),
            (subjects.SUBMIT, self._jobs.submit),
            (subjects.SUBMIT_ARRAY, self._jobs.submit_array),
            (subjects.RESUME, self._jobs.unpark),
            (subjects.PRIORITISE, self._jobs.prioritise),
            (subjects.SCALE, self._jobs.scale),
            (subjects.CHANGE_STAGE, self._jobs.change_stage),
            (subjects.RECUT, self._jobs.recut),
            (subjects.QUERY, self._jobs.query),
            (subjects.QUEUE_QUERY, self._jobs.queue_status),
            (subjects.MAKE_PLAN, self._plans.make),
            (subjects.RESERVATIONS_QUERY, self._jobs.reservations.query),
            (subjects.RESERVE_SLOTS, self._jobs.reservations.reserve),
            (subjects.CANCEL_RESERVATION, self._jobs.reservations.cancel),
            (subjects.MESH_QUERY, self._mesh_query),
            (subjects.SUBMIT_BUILD, self._builds.submit),
            (subjects.QUERY_BUILDS, self._builds.query),
            (subjects.RESUME_BUILD, self._builds.unpark),
            (subjects.PRIORITISE_BUILD, self._builds.prioritise),
            (subjects.DELETE_VERSION, self._builds.delete),
            (subjects.UNIT_PREPARED, self._builds.prepared),
            (subjects.DEPLOY_VERSION, self._services.deploy),
            (subjects.ORDER_SERVICE, self._services.order),
            (subjects.SERVICES_QUERY, self._services.query),
            (subjects.CORDON_PLACE, self._cordoning.cordon),
            (subjects.UNCORDON_PLACE, self._cordoning.uncordon),
            (subjects.LEAVE_NODE, self._cordoning.leave),
        )
        for row, server in requests:
            subscriptions.append(await insistently(partial(bus.serve, row, self._while_leading(server))))
        ends = (
            (subjects.CANCEL, self._jobs.cancel),
            (subjects.PARK, self._jobs.park),
            (subjects.ORDER_ARRAY, self._jobs.order_array),
            (subjects.CANCEL_BUILD, self._builds.cancel),
            (subjects.PARK_BUILD, self._builds.park),
        )
        for row, server in ends:
            subscriptions.append(await insistently(partial(bus.serve, row, self._always(server))))
        messages: tuple[tuple[Subject, Handler], ...] = (
            (subjects.STEP_CLAIM, self._claim),
            (subjects.TERMINATION, self._termination),
            (subjects.QOS_REPORT, self._quality),
            (subjects.FAULT_ANSWER, self._fault_questions.answer),
            (subjects.POLICY_SCORE, self._promotions.score),
            (subjects.SERVICE_OUTCOMES, self._watch.take),
        )
        for row, handler in messages:
            subscriptions.append(await insistently(partial(bus.subscribe, row, handler)))
        heard, unusable = self._policies.suggestion, self._policies.unusable
        suggestions = partial(bus.subscribe, subjects.SUGGESTION, heard, on_unusable=unusable)
        subscriptions.append(await insistently(suggestions))

    def _while_leading(self, server: Server) -> Server:
        """Answers once this orchestrator knows that it still leads: it may have been frozen or cut off."""

        async def confirmed_server(message: Message, envelope: Envelope) -> Sendable:
            await self._candidate.confirmed()
            return await server(message, envelope)

        return confirmed_server

    def _always(self, server: Server) -> Server:
        """Answers requests that end a job's work, even if the lead can't be confirmed now.

        The bus may take no writes. The job's record decides then, once it can be written, whether this
        orchestrator might end the job.
        """

        async def prompt_server(message: Message, envelope: Envelope) -> Sendable:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.confirm_s):
                    await self._candidate.confirmed()
            try:
                return await server(message, envelope)
            except NewerRecord as error:
                self._refuse(error)
                raise

        return prompt_server

    # --- the mesh ---------------------------------------------------------------------------------------
    async def _register(self, message: NodeRegistration, envelope: Envelope) -> Ack:
        known = self.mesh.services.get(message.sid)
        await self.mesh.service(message)
        if known is None or known.incarnation != message.incarnation:
            for run in self._runs.values():  # it has restarted and has no policy
                run.job.policies.bring(message.sid)
        return Ack()

    async def _node(self, message: NodeStatus, envelope: Envelope) -> Ack:
        await self.mesh.node(message)
        return Ack()

    async def _mesh_query(self, message: MeshQuery, envelope: Envelope) -> MeshStatus:
        jobs = tuple(
            JobSummary(
                job=record.job,
                array="" if record.array is None else record.array.array,
                name=record.spec.name,
                state=record.state,
                step=record.step,
                steps=record.last_step,
                reason=record.reason,
                alerts=self._runs[record.job].training.alerts.raised if record.job in self._runs else (),
            )
            for record in self._jobs.records()
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
        """Passes a person's order on to a module. An order about the active version ends its promotion."""
        if message.op in (ModuleOp.ACTIVATE, ModuleOp.SHADOW):
            await self._promotions.forget(message.module)
        return await self._policies.direct(message, envelope)

    # --- messages on their way to a job -----------------------------------------------------------------
    async def _topology(self, message: ModelTopology, envelope: Envelope) -> Ack:
        if run := self._runs.get(message.job):
            run.model_analysis.topology(message, envelope.sender.name)
        else:
            self._plans.topology(message, envelope.sender.name)
        return Ack()

    def _analysed(self, job: str) -> ModelTopology | None:
        run = self._runs.get(job)
        return run.model_analysis.known if run is not None else None

    async def _analysis_failed(self, message: AnalysisFailed, envelope: Envelope) -> Ack:
        if run := self._runs.get(message.job):
            run.model_analysis.analysis_failed(message, envelope.sender.name)
        else:
            self._plans.analysis_failed(message, envelope.sender.name)
        return Ack()

    async def _sample_written(self, message: SampleWritten, envelope: Envelope) -> Ack:
        if run := self._runs.get(message.job):
            run.model_analysis.sample_written(message, envelope.sender.name)
        return Ack()

    async def _claim(self, message: MicrobatchClaim, envelope: Envelope) -> None:
        if claimed := self._claims.get(message.job):  # else the job has no open step
            claimed(message)

    async def _termination(self, message: TerminationReport, envelope: Envelope) -> None:
        if run := self._runs.get(message.job):
            run.teardown.terminated(message)

    async def _fault(self, message: FaultReport, envelope: Envelope) -> Ack:
        run = self._runs.get(message.job) if message.job else None
        if message.kind == "device":  # the reporter repeats a report that was not answered
            placements = run.placements if run is not None else ()
            placed = next((place for place in placements if place.sid == message.sid), None)
            await self._cordoning.device(message, placed)
            return Ack(note="taken up")
        if run is not None:
            self._spawn(run.fault(message))
        return Ack(note="taken up" if run else "no such job runs")

    async def _judged(self, message: ClusterReport, envelope: Envelope) -> Ack:
        """What a node agent says of one of its instances: a stalled one is located like any fault."""
        run = self._runs.get(message.job)
        if run is None:  # and nobody would ever forget what is said of it
            return Ack(note="no such job runs")
        self.mesh.judged(message)
        if message.condition == "stalled" and message.scope != "none":
            self._spawn(run.fault(stall_of(message)))
        else:
            run.training.reported(message)
        return Ack(note="taken up")

    def _leaving(self, record: ServiceRecord) -> None:
        run = self._runs.get(record.job) if record.job else None
        if run is not None:
            self._spawn(run.departure(record))

    async def _quality(self, message: QosReport, envelope: Envelope) -> None:
        if run := self._runs.get(message.job or ""):
            self.mesh.report(message)
            run.training.reported(message)

    def readings(self) -> Iterator[metrics.MetricReading]:
        """Metrics of the jobs that have not ended."""
        runs = list(self._runs.values())
        for state, count in Counter(run.job.store.record.state for run in runs).items():
            yield metrics.JOBS(count, state=state)
        yield from self._jobs.queue.readings()
        yield from self._policies.readings()
        for run in runs:
            yield from run.training.readings(self.config.peak_tflops)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(self._contained(work))

    async def _contained(self, work: Coroutine[None, None, None]) -> None:
        """Logs an error of `work`: in a TaskGroup the failure of one job would end all others."""
        try:
            await work
        except NewerRecord as error:
            self._refuse(error)
        except DmscError as error:
            log.error("orchestrator task failed", reason=str(error))
        except Exception as error:
            log.error("orchestrator task failed", exc_info=error)
