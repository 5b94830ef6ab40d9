"""The life of one job (draft §4.4): analysis, plan, deployment, training, end, clean-up; and recoveries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from bus.logs import bind, get_logger
from bus.tasks import background, cancel
from bus.wire.correlation import correlate, current_cause
from entities.orchestrator.checkpointing.checkpoints import Checkpoints
from entities.orchestrator.checkpointing.weight_export import export_weights
from entities.orchestrator.faults.fault_location import WARNINGS, locate, turned_round
from entities.orchestrator.job.awaited_data import await_data
from entities.orchestrator.job.bus_outages import BusOutages
from entities.orchestrator.job.deployment import Deployment
from entities.orchestrator.job.model_analysis import ModelAnalysis
from entities.orchestrator.job.parking import Parking, written_down
from entities.orchestrator.job.takeover_service import TakeoverService
from entities.orchestrator.job.teardown import Teardown
from entities.orchestrator.job.term import TermContext
from entities.orchestrator.job.training import Training
from entities.orchestrator.job_state.context import JobContext, settle
from entities.orchestrator.job_state.decision_record import DecisionRecord
from entities.orchestrator.job_state.event_writer import EventWriter
from entities.orchestrator.job_state.guarded_tasks import GuardedTasks
from entities.orchestrator.job_state.ingress_gateway import IngressGateway
from entities.orchestrator.job_state.instances import JobInstances, MemberLost
from entities.orchestrator.job_state.job_faults import JobFaults
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.job_state.quarantine import Quarantine
from entities.orchestrator.job_state.retry_limits import Parked, RetryLimits
from entities.orchestrator.membership.fewer_stages import FewerStages
from entities.orchestrator.membership.job_actions import JobActions
from entities.orchestrator.membership.job_shape import JobShape
from entities.orchestrator.membership.recut_plan import recut_proposal
from entities.orchestrator.membership.slot_holding import SlotHolding
from entities.orchestrator.planning.memory_fit import fixed_by_memory
from entities.orchestrator.planning.shape_choice import with_shape
from entities.orchestrator.planning.window_room import largest_windows
from entities.orchestrator.queue.job_queue import JobQueue
from entities.planner.planning_process import beside_the_loop
from schemas.errors import Conflict, DmscError, Fenced, NewerRecord, Unavailable
from schemas.fault import FaultReport
from schemas.job import JobRecord, JobState, WeightsManifest
from schemas.recut import RecutAnswer, RecutJob
from schemas.registry import InstanceState, ServiceRecord
from schemas.step import Member
from schemas.task_graph import ModelTopology, Placement
from schemas.training_length import length_text, samples_of, with_steps

log = get_logger("orchestrator")


class JobRun:
    """Drives one job: to its end, or until it has to be parked (`parked`: why).

    Args:
        queue: who has it wait, and knows what other jobs hold.
        gateway: the gateway that took the job.
        parked: why the job was parked before this run; None: it was not.
    """

    def __init__(
        self,
        term: TermContext,
        queue: JobQueue,
        store: JobStore,
        gateway: str,
        parked: Parked | None = None,
    ) -> None:
        record = store.record
        bus, mesh = term.bus, term.mesh
        instances, policies = JobInstances(bus, mesh, record), PolicyDistribution(bus, mesh)
        self.job = job = JobContext(
            bus=bus,
            mesh=mesh,
            name=record.job,
            spec=record.spec,
            epoch=record.epoch,
            store=store,
            instances=instances,
            policies=policies,
            gateway=IngressGateway(mesh, policies, store, gateway),
            decisions=DecisionRecord(bus, record.job, record.epoch, store.confirmed),
            events=EventWriter(store, instances),
            tasks=GuardedTasks(),
            faults=JobFaults(term.faults, mesh, record.job, bus.sender.name),
            quarantine=Quarantine(record.spec.training.on_bad_microbatch, record.microbatch_faults),
            retry_limits=RetryLimits(record.setbacks, roll_backs=record.roll_backs, furthest=record.furthest),
            queue=queue,
            claims=term.claims,
            ask_modules=term.ask_modules,
            planning=term.planning,
        )
        self._outages = BusOutages(job.name, store.reason)
        self.checkpoints = Checkpoints(job)
        self.training = Training(job, self.checkpoints)
        self.model_analysis = ModelAnalysis(job, term.analyses)
        self.teardown = Teardown(job, self.checkpoints)
        # one that is held before it began waits in the queue, which says so
        waits = record.ends_as is None and not (record.held and record.state is JobState.PARKED)
        self._deployment = Deployment(job, self._outages, waits=waits)
        self.parked: Parked | None = None
        waiting = lambda: self._deployment.waiting is not None  # noqa: E731
        self.parking = Parking(job, self.training, self._interrupt, parked, waiting)
        self.holding = SlotHolding(
            job,
            self.training,
            self.parking,
            waiting=lambda: self._deployment.waiting,
            placed_at=lambda: self._deployment.placed_at,
            leaving=lambda: self.training.changes.leaving,
            over=lambda: self.over,
        )
        self.actions = JobActions(
            job,
            self.training,
            self.checkpoints,
            self.holding,
            largest_windows=lambda: largest_windows(
                job.spec, job.instances.graph, self.model_analysis.known, job.instances.slot_memory()
            ),
            topology=lambda: self.model_analysis.known,
        )
        self.shape = JobShape(job, self.training.scale, lambda: self._deployment.forget_shape())
        present = self.model_analysis.present
        self.fewer_stages = FewerStages(job, self.training.job_changes, present, self.give_way)
        self._reported: set[tuple[str, str, str]] = set()
        self._cancelled: str | None = None
        self._cancelling = asyncio.Lock()
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The job's id."""
        return self.job.name

    @property
    def over(self) -> bool:
        """Whether it is certain how the job ends; only the clean-up may be left."""
        return self._over.is_set()

    @property
    def placements(self) -> Sequence[Placement]:
        return self.job.instances.placements

    @property
    def step(self) -> int:
        """The step that is open."""
        return self.training.step

    # --- reports and requests ------------------------------------------------------------------------
    async def fault(self, report: FaultReport) -> None:
        """Locates a fault that MG or SR reported about one of its instances, then acts on the verdict."""
        correlate(self.job.store.record.correlation, cause=current_cause())
        member = self.job.instances.members.get(report.sid)
        key = (report.sid, report.incarnation, report.kind)
        if member is None or member.incarnation != report.incarnation or member in self.job.instances.lost:
            return
        if self._over.is_set() or (report.kind == "instance" and key in self._reported):
            return
        witness = report.witness
        if witness is not None and not self.job.instances.is_present(witness):
            return  # a fenced witness: its neighbours closed their links on purpose
        if report.silent and witness is not None:
            self.training.silence(witness, member)
        self._reported.add(key)
        fault = self.job.faults.reported(report, step=self.step, attempt=self.training.attempt)
        graph = self.job.instances.graph
        verdict = await locate(self.job.bus, self.job.mesh, self.name, member, graph, report)
        if not self._over.is_set():
            verdict = await self.training.failures.choices.weigh(member, report, verdict)
        if self._over.is_set():  # its faults were closed with the job
            return
        self.job.faults.located(fault, verdict)
        text = f"{verdict.verdict} ({verdict.reason}); {verdict.action}"
        if verdict.verdict == "structural":
            self.training.failures.lost(member, verdict.reason, text)
            return
        self._reported.discard(key)
        if self.job.instances.is_present(member):  # else its loss was reported meanwhile
            await self.job.store.tell("fault", text=f"{member.sid}: {text}", warning=report.kind in WARNINGS)
        if (turned := turned_round(report, verdict)) is not None:
            await self.fault(turned)

    def drain(self, sid: str, left_s: float | None = None) -> str:
        """Has an instance leave its node; returns an obstacle, or ''. The caller asks again until it is gone.

        `left_s`: its machine goes away in so many seconds; it leaves even if there is no room; returns how.
        No step is lost: a replica has the state, or a checkpoint of the same step.
        """
        if self.over or sid not in self.job.instances.members:
            return "not running now"
        return self.training.drain(sid, left_s)

    def move(self, sid: str, stage: int, by: str) -> str:
        """A person has an instance change its stage; see `Rebalancing.ask`."""
        if self.job.store.record.state is not JobState.RUNNING:
            raise Conflict(
                f"job {self.job.name} is {self.job.store.record.state}; only in a running one can move"
            )
        if why := self.training.recutting.under_way:
            raise Conflict(f"{why}: ask again when it is in force")
        return self.training.rebalancing.ask(sid, stage, by)

    async def recut(self, message: RecutJob) -> RecutAnswer:
        """Begins a re-cut, or says what it would be; see `recut_proposal` and `Recutting.begin`."""
        topology = await self.model_analysis.present()
        state = self.job.store.record.state
        if state is not JobState.RUNNING or topology is None:
            raise Conflict(f"job {self.job.name} is {state}; only a running one can be cut anew")
        self.training.rebalancing.check_nobody_moves()
        question = self.training.recutting.question(message, topology)
        proposal = await beside_the_loop(recut_proposal, question)
        self.training.rebalancing.check_nobody_moves()
        answer = self.training.recutting.begin(message, proposal)
        if message.cuts is not None and not message.dry_run:  # not one that is left to the planner
            self.actions.asked_by_person(answer.plan, message.user)
        return answer

    def give_way(self, why: str) -> bool:
        """Has it park at the end of the open step, and go on as soon as there is room; False: not now."""
        return self.parking.give_way(why, held=False)

    def present_record(self) -> JobRecord:
        """The job's record, with a changed graph that is not written yet."""
        record, graph = self.job.store.record, self.job.instances.deployed
        return record if graph is None else record.model_copy(update={"graph": graph})

    async def departure(self, record: ServiceRecord) -> None:
        """The registry says that an instance drains, has failed, or is gone.

        An instance that was ordered to go is no longer a member. An instance that leaves by itself, because
        its node agent ends, is no fault that MG or SR would report. They report a failure, unless they died
        with the instance.
        """
        member = Member(sid=record.sid, incarnation=record.incarnation)
        if record.state is InstanceState.FAULTED:
            await asyncio.sleep(self.job.times.run.reported_s)
            evidence = f"registry says faulted: {record.reason or 'no reason given'}, and nobody reports it"
            await self.fault(
                FaultReport(
                    reporter="orchestrator",
                    job=self.job.name,
                    sid=member.sid,
                    incarnation=member.incarnation,
                    kind="instance",
                    evidence=evidence,
                )
            )
        elif self.job.instances.is_present(member) and not self.over:
            self.training.failures.lost(
                member, f"took leave: {record.reason}", f"took leave ({record.reason}); replace"
            )

    async def cancel(self, reason: str) -> None:
        """Ends the job; everything is cleaned up. Returns once the order is written, if the bus takes it."""
        async with self._cancelling:  # whoever asks again waits for the same write
            if self._cancelled is None and not self.over:
                self._cancelled = reason
                ends = self.job.store.note(now=True, ends_as=JobState.CANCELLED, ends_because=reason)
                await written_down(ends, self.job.times.run.order_kept_s)
                if self._task is not None and self.parked is None:  # a parked job's next run ends it
                    self._task.cancel()

    async def shut_down(self, *, deposed: bool) -> None:
        """Stops the run. The record stays as it is, so that the next orchestrator resumes the job.

        A job that is over gets a moment for its clean-up, unless another orchestrator leads by now.
        """
        self.parking.interrupted = False  # the run ends, and not the job's training
        if self._task is not None and not self._task.done():
            if self.over and not deposed:
                await asyncio.wait({self._task}, timeout=self.job.times.run.clean_up_s)
            await cancel(self._task)

    # --- the job's life -----------------------------------------------------------------------------------
    async def run(self) -> None:
        """Runs to an end. If it is cancelled without `cancel` (a shutdown), the record stays as it is."""
        self._task = asyncio.current_task()
        bind(job=self.job.name, step=lambda: self.step)
        correlate(self.job.store.record.correlation)
        try:
            await self._to_the_end()
        finally:
            self.parking.stop()
            await self.job.policies.close()

    def _interrupt(self) -> bool:
        """Interrupts the run; returns False if it is at its end.

        Steps after the last checkpoint are computed again when the job goes on.
        """
        if self._cancelled is not None or self.parked is not None or self.over:
            return False
        if self._task is not None:
            self._task.cancel()
        return True

    async def _to_the_end(self) -> None:
        record = self.job.store.record
        try:
            if record.ends_as is not None:  # an earlier orchestrator ended it; the clean-up is left
                state, reason = record.ends_as, record.ends_because
                await self.teardown.agents_back()
            else:
                state, reason = await self._outcome()
            if state is JobState.PARKED:
                await self._park(reason)
                return
            self._over.set()
            with contextlib.suppress(Unavailable):
                # this also confirms that the job is ours: the orders that follow carry no epoch
                await self.job.store.note(now=True, ends_as=state, ends_because=reason)
        except Fenced as error:
            log.error("another orchestrator has this job", job=self.job.name, reason=str(error))
            await self.checkpoints.abandon()
            return
        except NewerRecord:
            await self.checkpoints.abandon()
            raise
        self.job.faults.ended(state is JobState.DONE, reason)
        await self.teardown.run()  # if it is interrupted, the next leader cleans up: the record names the end
        await self.job.store.move(state, reason)

    async def _outcome(self) -> tuple[JobState, str]:
        """Trains the job; returns the state in which it ends, and why.

        Raises:
            Fenced: another orchestrator has the job.
            NewerRecord: a record of it is of a version that this software does not read.
        """
        try:
            if self._cancelled is not None or self.parking.interrupted:
                raise asyncio.CancelledError
            manifest = await self._work()
            return JobState.DONE, f"weights {manifest.sha256[:12]}"
        except asyncio.CancelledError:
            if self._cancelled is None and not self.parking.interrupted:
                await self.checkpoints.abandon()
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # we are inside a task
            if self._cancelled is not None:
                return JobState.CANCELLED, self._cancelled
            return self._as_parked(self.parking.as_parked())
        except (Fenced, NewerRecord):
            raise
        except Parked as parked:
            return self._as_parked(parked)
        except Unavailable as error:  # the mesh is at fault, and not the job: it can go on later
            log.error("job parked: the mesh lacks something", job=self.job.name, reason=error.text)
            return self._as_parked(Parked(error.text, for_room=False))
        except DmscError as error:
            return JobState.FAILED, error.text
        except Exception as error:
            log.error("job failed on an internal error", job=self.job.name, exc_info=error)
            return JobState.FAILED, f"internal error: {type(error).__name__}: {error}"

    def _as_parked(self, why: Parked) -> tuple[JobState, str]:
        self.parked = why
        return JobState.PARKED, why.text

    async def _park(self, reason: str) -> None:
        """Frees all that the job holds; its training is in its checkpoints.

        The record is changed last: until then a new orchestrator takes the job up as a running one.
        """
        log.warning("job parked", job=self.job.name, reason=reason)
        await self.checkpoints.abandon()
        await self.teardown.park()
        changes = self.training.failures.counts
        if self.parked is not None and self.parked.by_person:
            changes["held"] = reason
        if self.parked is not None and self.parked.unstaffed:
            changes["former_shape"] = self.fewer_stages.kept_shape()
        await self.job.store.move(JobState.PARKED, reason, **changes)
        await self.job.store.tell("recovery", text=f"parked at its last checkpoint: {reason}")

    async def _work(self) -> WeightsManifest:
        async with self.training:
            if self.job.store.record.state is JobState.PARKED:
                await self._until_resumed()
                await await_data(self.job, self._outages)
                await self._deploy()
            elif self.job.epoch > 1 and await self._adopt():
                self.parking.taken_over(adopted=True)
            else:
                if self.job.epoch > 1:
                    await self._outages.outlast("freeing what it held", self.teardown.reclaim)
                    self.parking.taken_over(adopted=False)
                await await_data(self.job, self._outages)
                await self.job.store.move(JobState.ANALYSING, "layers, costs, data")
                await self._deploy()
            await self._train()
            return await self._finish()

    async def _deploy(self) -> None:
        """Analyses the model, and starts the instances in their slots."""
        topology = await self._outages.outlast("having the model analysed", self.model_analysis.analyse)
        await self._settle_steps(topology)
        if self.job.spec.parallel.auto:
            await self._choose_shape(topology)
        if self.job.spec.training.auto:
            await self._fix_by_memory(topology)
            topology = await self._outages.outlast("having the model analysed", self.model_analysis.analyse)
        await self.fewer_stages.settle(topology)
        await self.job.gateway.until_routed()
        async with background(self.fewer_stages.look_again(topology, self._deployment.forget_shape)):
            await self._deployment.deploy(topology)
        await self.training.begin()
        await self.job.store.tell("instances", instances=self.job.instances.views())

    async def _settle_steps(self, topology: ModelTopology) -> None:
        """Makes a number of steps of what `training.until` says in tokens or epochs; the record keeps it."""
        samples = samples_of(self.job.spec, topology.epoch_samples, topology.data_tokens)
        settled = with_steps(self.job.spec, samples)
        if settled != self.job.spec:
            await settle(self.job, settled)

    async def _choose_shape(self, topology: ModelTopology) -> None:
        """Replaces `auto` stages and replicas by the planner's choice; the record keeps it."""
        job = self.job
        chosen, because = await with_shape(job.spec, topology, job.eligible_nodes(), job.planning)
        await settle(job, chosen)
        await self.job.store.reason(because)

    async def _fix_by_memory(self, topology: ModelTopology) -> None:
        """Replaces what says `auto` by values; the record keeps them, for whoever goes on with the job."""
        fixed, because = fixed_by_memory(self.job.spec, topology, self.job.eligible_nodes())
        await settle(self.job, fixed)
        await self.job.store.reason(because)

    async def _until_resumed(self) -> None:
        if self.parking.waits:
            self._deployment.waits = False
            await self.parking.until_resumed()
            self._deployment.waits = True

    async def _adopt(self) -> bool:
        """Goes on with the living instances of an earlier orchestrator; returns False if none live."""
        record = self.job.store.record
        if record.graph is None:
            return False
        self.job.instances.graph = record.graph
        takeover = TakeoverService(self.job)
        resume_point = await self._outages.outlast("looking for its instances", takeover.find_resume_point)
        if resume_point is None:
            if self.job.decisions.unknown:
                text = "the last decision can't be read: all back to the checkpoint"
                await self.job.store.tell("recovery", text=text)
            self.job.instances.deployed = None
            return False
        self._deployment.waits = False
        await self.job.store.move(JobState.RECOVERING, f"adopted in epoch {self.job.epoch}")
        await self.job.gateway.choose(record.graph)
        await self.training.go_on(resume_point)
        there = f"{len(resume_point.everyone)} of {len(record.graph.units)} instances"
        text = f"adopted {there} in epoch {self.job.epoch}, at step {resume_point.step}"
        await self.job.store.tell("recovery", text=text)
        await self.job.store.tell("instances", instances=self.job.instances.views())
        return True

    async def _train(self) -> None:
        steps = self.job.store.record.last_step
        await self.job.store.move(JobState.RUNNING, f"step {self.training.step} of {length_text(steps)}")
        self.fewer_stages.began()
        self.job.queue.again()  # from now on it can be told to change its size, or to park
        await self.training.run()
        await self.training.events_written()

    # --- the end ------------------------------------------------------------------------------------------
    async def _export(self) -> WeightsManifest:
        training = self.training
        return await export_weights(self.job, training.stages(), training.step)

    async def _finish(self) -> WeightsManifest:
        await self.job.store.move(JobState.FINISHING, "weights")
        while True:
            try:
                manifest = await self._outages.outlast("writing its weights", self._export)
                break
            except MemberLost as lost:
                self.training.losing(lost.members, str(lost))
                await self.training.until_whole()
                if self.training.step < self.job.store.record.last_step:  # steps are run again
                    await self.training.run()
                await self.job.store.move(JobState.FINISHING, "weights")
        await self.job.store.note(now=True, weights=manifest)
        await self.job.store.tell("weights", weights=manifest)
        if self.job.spec.sample is not None and self.job.spec.sample.tokens:
            text = await self.model_analysis.write_sample(manifest)
            if text:
                await self.job.store.note(now=True, sample=text)
                await self.job.store.tell("sample", sample=text)
        await self.checkpoints.finish()
        return manifest
