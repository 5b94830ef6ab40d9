"""One job's life (draft §4.4): analyse, plan, deploy, train, finish, clean up, and recover in between."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import partial

from bus.connection import Bus
from bus.logs import bind, get_logger
from bus.wire.correlation import correlate, current_cause
from entities.orchestrator.checkpointing.checkpoints import Checkpoints
from entities.orchestrator.faults.fault_location import locate
from entities.orchestrator.faults.fault_queue import FaultQueue
from entities.orchestrator.faults.job_faults import JobFaults
from entities.orchestrator.job.bus_outages import BusOutages
from entities.orchestrator.job.ingress_gateway import IngressGateway
from entities.orchestrator.job.model_analysis import ModelAnalysis
from entities.orchestrator.job.parking import REST_S, Parking, written_down
from entities.orchestrator.job.takeover_service import TakeoverService
from entities.orchestrator.job.teardown import Teardown
from entities.orchestrator.job.training import Training
from entities.orchestrator.job.weight_export import export_weights
from entities.orchestrator.job_state.instances import (
    JobInstances,
    MemberLost,
    NodeLost,
    NotReady,
    StartFailed,
)
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.job_state.retry_limits import Parked
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.planning.task_graph import plan, why_inexact
from entities.orchestrator.queue.job_queue import Waiting, emptied, free_slots, slots_of, turn
from entities.orchestrator.queue.slot_demand import SlotDemand
from schemas.errors import Conflict, DmscError, Fenced, NewerRecord, Unavailable
from schemas.fault import FaultReport
from schemas.job import JobRecord, JobState, WeightsManifest
from schemas.registry import InstanceState, ServiceRecord
from schemas.stage_move import MoveForecast
from schemas.step import Member, MicrobatchClaim
from schemas.task_graph import ModelTopology, Placement, TaskGraph

log = get_logger("orchestrator")

CLEAN_UP_S = 3.0
"""How long a shutdown waits for clean-up. The whole mesh may be stopping: then nobody answers any more."""
DEPLOY_AGAIN_S, DEPLOY_AGAIN_MOST_S = 0.1, 10.0
"""Pause before a failed deployment is planned again; it doubles each time, up to the second value."""
START_TRIES = 3
READY_TRIES = 3
"""Deployments in a row whose instances did not become ready before the job is parked."""
REPORTED_S = 2.0
"""How long MG and SR have to report a failure that the registry knows, before it is handled without them."""


class JobRun:
    """Drives one job to its end, or until it has to be parked (`parked`: why).

    Args:
        room: the slots that other jobs hold or wait for.
        parked: why the job was parked before this run; None: it was not.
    """

    def __init__(
        self,
        bus: Bus,
        mesh: MeshView,
        journal: JobStore,
        gateway: str,
        room: SlotDemand,
        faults: FaultQueue,
        parked: Parked | None = None,
    ) -> None:
        record = journal.record
        self._bus = bus
        self._mesh = mesh
        self._room = room
        self.journal = journal
        self.job = record.job
        self.spec = record.spec
        self.epoch = record.epoch
        self._outages = BusOutages(journal.job, journal.reason)
        self.communication = PolicyDistribution(bus, mesh)
        self.instances = JobInstances(bus, mesh, self.job, self.spec, self.epoch)
        self.checkpoints = Checkpoints(bus, mesh, self.instances, journal, self.epoch)
        self._faults = JobFaults(faults, mesh, self.job, bus.sender.name)
        self.entry = IngressGateway(
            mesh,
            self.communication,
            self.job,
            self.spec,
            gateway,
            lambda text: journal.tell("recovery", text=text),
        )
        self.training = Training(
            bus,
            mesh,
            journal,
            self.instances,
            self.checkpoints,
            self.communication,
            self._faults,
            room.occupied,
            lambda: self.entry.sid,
            self.entry.leave,
        )
        self.model_work = ModelAnalysis(bus, mesh, journal)
        self.clean_up = Teardown(
            bus, mesh, journal, self.instances, self.checkpoints, self.communication, self.entry
        )
        self._fits: bool | None = None
        self._waits = record.ends_as is None and not record.held
        self.parked: Parked | None = None
        self.parking = Parking(
            journal, mesh, self.training, lambda: self.instances.patience_s(REST_S), self._interrupt, parked
        )
        self._reported: set[tuple[str, str, str]] = set()
        self._cancelled: str | None = None
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """The end of the job is certain; only the clean-up is left."""
        return self._over.is_set()

    @property
    def placements(self) -> Sequence[Placement]:
        graph = self.instances.graph
        return () if graph is None else graph.placements

    @property
    def finds_room(self) -> bool:
        return self.training.finds_room

    @property
    def waiting(self) -> Waiting | None:
        """The job's place in the queue; None if it has instances, or waits for something else than room."""
        if not self._waits or self.over:
            return None
        clusters, slots = self.spec.parallel.clusters, slots_of(self.spec.parallel)
        if self._fits is None:  # the job has not been planned yet: slots are only counted
            nodes = self._mesh.nodes.values()
            there = sum(len(node.slots) for node in nodes if not clusters or node.cluster in clusters)
        return Waiting(
            job=self.job,
            slots=slots,
            clusters=tuple(clusters),
            submitted_at=self.journal.record.submitted_at,
            parked=self._has_trained,
            fits=slots <= there if self._fits is None else self._fits,
        )

    @property
    def _has_trained(self) -> bool:
        record = self.journal.record
        return record.state is JobState.PARKED or record.loss_first is not None

    @property
    def step(self) -> int:
        """The step that is open."""
        return self.training.step

    # --- what the service hands in ------------------------------------------------------------------------
    def claimed(self, claim: MicrobatchClaim) -> None:
        self.training.claimed(claim)

    async def fault(self, report: FaultReport) -> None:
        """Handles a report of MG or SR about one of this job's instances: locates the fault, acts on it."""
        correlate(self.journal.record.correlation, cause=current_cause())
        member = self.instances.members.get(report.sid)
        key = (report.sid, report.incarnation, report.kind)
        if member is None or member.incarnation != report.incarnation or member in self.instances.lost:
            return
        if self._over.is_set():
            return
        if report.kind == "instance" and key in self._reported:
            return
        witness = report.witness
        if witness is not None and not self.instances.is_present(witness):
            return  # the witness is fenced itself: its neighbours closed their links on purpose
        if report.silent and witness is not None:
            self.training.silence(witness, member)
        self._reported.add(key)
        fault = self._faults.reported(report, step=self.step, attempt=self.training.attempt)
        verdict = await locate(self._bus, self._mesh, self.instances, self.job, member, report)
        if self._over.is_set():  # the job's faults were closed meanwhile
            return
        self._faults.located(fault, verdict)
        text = f"{verdict.verdict} ({verdict.reason}); {verdict.action}"
        if verdict.verdict == "structural":
            self.training.lost(member, verdict.reason, text)
            return
        self._reported.discard(key)
        if self.instances.is_present(member):  # else its loss was reported while the fault was located
            await self.journal.tell("fault", text=f"{member.sid}: {text}")

    def drain(self, sid: str) -> str:
        """Has an instance leave its node; returns what stands in the way, or ''.

        Its next incarnation takes the state from a replica of the stage or, where there is none, from a
        checkpoint of that very step. The caller asks again until the instance is gone.
        """
        if self.over or self.instances.graph is None or sid not in self.instances.members:
            return "not running now"
        return self.training.drain(sid)

    def move(self, sid: str, stage: int, by: str, forecast: MoveForecast | None = None) -> str:
        """See `Rebalancing.ask`."""
        if self.journal.record.state is not JobState.RUNNING:
            raise Conflict(f"job {self.job} is {self.journal.record.state}; only in a running one can move")
        return self.training.move(sid, stage, by, forecast)

    def as_it_stands(self) -> JobRecord:
        """The job's record, with the units that were just ordered and are not written yet."""
        record, graph = self.journal.record, self.instances.graph
        return record if graph is None else record.model_copy(update={"graph": graph})

    def scale(self, stage: int | None, replicas: int) -> str:
        """Scales one stage, or all stages if `stage` is None; see `MembershipChanges.scale`."""
        if self.journal.record.state is not JobState.RUNNING:
            raise Conflict(f"job {self.job} is {self.journal.record.state}; only a running one can be scaled")
        stages = range(self.spec.parallel.stages) if stage is None else [stage]
        return "; ".join(self.training.scale(index, replicas) for index in stages)

    async def leaving(self, record: ServiceRecord) -> None:
        """Handles the registry's news that an instance drains, has failed, or is gone.

        An instance that was ordered to go no longer belongs to the job. One that leaves by itself (its node
        agent ends, and its instances with it) is lost, and MG and SR report no fault. They do report a
        failure; if they don't within `REPORTED_S` (they may have died with it), it is handled here.
        """
        member = Member(sid=record.sid, incarnation=record.incarnation)
        if record.state is InstanceState.FAULTED:
            await asyncio.sleep(REPORTED_S)
            evidence = f"registry says faulted: {record.reason or 'no reason given'}, and nobody reports it"
            await self.fault(
                FaultReport(
                    reporter="orchestrator",
                    job=self.job,
                    sid=member.sid,
                    incarnation=member.incarnation,
                    kind="instance",
                    evidence=evidence,
                )
            )
        elif self.instances.is_present(member) and not self.over:
            self.training.lost(
                member, f"took leave: {record.reason}", f"took leave ({record.reason}); replace"
            )

    async def cancel(self, reason: str) -> None:
        """Ends the job and cleans up; returns once the record says so, so that the order can't be lost."""
        if self._cancelled is None and not self.over:
            self._cancelled = reason
            ends = self.journal.note(now=True, ends_as=JobState.CANCELLED, ends_because=reason)
            await written_down(ends)
            if self._task is not None and self.parked is None:  # else the next run ends it
                self._task.cancel()

    async def shut_down(self, *, deposed: bool) -> None:
        """Stops the run because the orchestrator stops; the record stays, so that the next start resumes it.

        A job that is over gets a moment to clean up, unless it belongs to another orchestrator by now.
        """
        self.parking.interrupted = False  # this is the end of the run, and not of the job's training
        if self._task is not None and not self._task.done():
            if self.over and not deposed:
                await asyncio.wait({self._task}, timeout=CLEAN_UP_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # --- the job's life -----------------------------------------------------------------------------------
    async def run(self) -> None:
        """Runs the job to an end. If its task is cancelled without `cancel` (shutdown), the record stays."""
        self._task = asyncio.current_task()
        bind(job=self.job, step=lambda: self.step)
        correlate(self.journal.record.correlation)
        try:
            await self._to_the_end()
        finally:
            self.parking.stop()
            await self.communication.close()

    def _interrupt(self) -> bool:
        """Ends the run where it stands; returns False if it is at its end already.

        Steps that are in no checkpoint are computed again when the job goes on.
        """
        if self._cancelled is not None or self.parked is not None or self.over:
            return False
        if self._task is not None:
            self._task.cancel()
        return True

    async def _to_the_end(self) -> None:
        record = self.journal.record
        try:
            if (
                record.ends_as is not None
            ):  # it ended under an earlier orchestrator: only the clean-up is left
                state, reason = record.ends_as, record.ends_because
                await self.clean_up.agents_back()
            else:
                state, reason = await self._outcome()
            if state is JobState.PARKED:
                await self._park(reason)
                return
            self._over.set()
            with contextlib.suppress(Unavailable):
                # this write also proves that the job is ours: the orders that follow carry no epoch
                await self.journal.note(now=True, ends_as=state, ends_because=reason)
        except Fenced as error:
            log.error("another orchestrator has this job", job=self.job, reason=str(error))
            await self.checkpoints.abandon()
            return
        except NewerRecord:
            await self.checkpoints.abandon()
            raise
        self._faults.ended(state is JobState.DONE, reason)
        await self.clean_up.run()  # if interrupted, the next leader does it: the record says how the job ends
        await self.journal.move(state, reason)

    async def _outcome(self) -> tuple[JobState, str]:
        """Runs the job; returns the state in which it ended, and why.

        Raises:
            Fenced: another orchestrator has the job.
            NewerRecord: one of its records has a version that this software can't read.
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
            return self._as_parked(Parked(self.parking.held or "parked", for_room=False))
        except Fenced:
            raise
        except NewerRecord:
            raise
        except Parked as parked:
            return self._as_parked(parked)
        except (
            Unavailable
        ) as error:  # a fault of the mesh, not of the job: it can go on once that is repaired
            log.error("job parked for want of others", job=self.job, reason=error.text)
            return self._as_parked(Parked(error.text, for_room=False))
        except DmscError as error:
            return JobState.FAILED, error.text
        except Exception as error:
            log.error("job failed on an internal error", job=self.job, exc_info=error)
            return JobState.FAILED, f"internal error: {type(error).__name__}: {error}"

    def _as_parked(self, why: Parked) -> tuple[JobState, str]:
        self.parked = why
        return JobState.PARKED, why.text

    async def _park(self, reason: str) -> None:
        """Frees everything that the job holds; its training so far is in its checkpoints.

        The record says so last: until then the job counts as one that an orchestrator left behind.
        """
        log.warning("job parked", job=self.job, reason=reason)
        await self.checkpoints.abandon()
        await self.clean_up.park()
        await self.journal.move(JobState.PARKED, reason, **self.training.counted)
        await self.journal.tell("recovery", text=f"parked at its last checkpoint: {reason}")

    async def _work(self) -> WeightsManifest:
        async with self.training:
            if self.journal.record.state is JobState.PARKED:
                await self._until_resumed()
                await self._deploy(await self._analyse())
            elif self.epoch > 1 and await self._adopt():
                self.parking.taken_over(adopted=True)
            else:
                if self.epoch > 1:
                    await self._outages.outlast("freeing what it held", self.clean_up.reclaim)
                    self.parking.taken_over(adopted=False)
                await self.journal.move(JobState.ANALYSING, "layers, costs, data")
                await self._deploy(await self._analyse())
            await self._train()
            return await self._finish()

    async def _analyse(self) -> ModelTopology:
        return await self._outages.outlast("having the model analysed", self.model_work.analyse)

    async def _until_resumed(self) -> None:
        if self.parking.waits:
            self._waits = False
            await self.parking.until_resumed()
            self._waits = True

    async def _adopt(self) -> bool:
        """Goes on with the living instances that an earlier orchestrator left; False if it can't."""
        record = self.journal.record
        if record.graph is None:
            return False
        self.instances.graph = record.graph
        takeover = TakeoverService(self._bus, self._mesh, self.instances, self.training.record, self.epoch)
        settled = await self._outages.outlast("looking for its instances", takeover.settle)
        if settled is None:
            if self.training.record.unknown:
                text = "nobody can read what was decided last: all back to the checkpoint"
                await self.journal.tell("recovery", text=text)
            self.instances.graph = None
            return False
        self._waits = False
        await self.journal.move(JobState.RECOVERING, f"adopted in epoch {self.epoch}")
        await self.entry.choose(record.graph)
        await self.training.go_on(settled)
        await self.journal.tell(
            "recovery",
            text=f"adopted {len(settled.everyone)} of {len(record.graph.units)} instances in epoch "
            f"{self.epoch}, at step {settled.step}",
        )
        await self.journal.tell("instances", instances=self.instances.views())
        return True

    async def _train(self) -> None:
        steps = self.spec.training.steps
        await self.journal.move(JobState.RUNNING, f"step {self.training.step} of {steps}")
        await self.training.run()
        await self.training.told()

    async def _deploy(self, topology: ModelTopology) -> None:
        """Plans the job and starts all instances; plans again without a node that turns out to be dead.

        Raises:
            Parked: instances repeatedly did not become ready.
        """
        pause_s, unready = DEPLOY_AGAIN_S, 0
        while True:
            graph = await self._plan(topology)
            await self.entry.choose(graph)
            try:
                await self._start(graph)
                break
            except NodeLost as lost:
                await self._without_node(lost)
            except NotReady as late:
                unready += 1
                if unready >= READY_TRIES:
                    text = f"{unready} times in a row its instances were not ready, the last: {late.text}"
                    raise Parked(text, for_room=False) from None
                await self._plan_again(late.text)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, DEPLOY_AGAIN_MOST_S)
        await self.training.begin()
        await self.journal.tell("instances", instances=self.instances.views())

    async def _plan(self, topology: ModelTopology) -> TaskGraph:
        """Waits in the queue until it is the job's turn and there is room; returns the placed task graph."""
        while True:
            began = time.monotonic()
            graph = self._in_turn(topology)
            if not isinstance(graph, NoRoom):
                break
            waits_as = JobState.PARKED if self._has_trained else JobState.QUEUED
            if self.journal.record.state is not waits_as:
                await self.journal.move(waits_as, graph.reason)
            else:
                await self.journal.reason(graph.reason)
            await self._mesh.next_change()
        planned_s = time.monotonic() - began
        self.instances.graph = graph
        self._waits = False
        if self.journal.record.state is JobState.QUEUED:
            await self.journal.move(JobState.ANALYSING, "room was found")
        because = why_inexact(self.spec, graph)
        await self.journal.move(
            JobState.DEPLOYING,
            graph.reason,
            graph=graph,
            plan_s=planned_s,
            exact=not because,
            inexact_because=because,
        )
        return graph

    def _in_turn(self, topology: ModelTopology) -> TaskGraph | NoRoom:
        nodes, cordoned = list(self._mesh.nodes.values()), self._mesh.cordons.places()
        occupied, own = self._room.occupied(self.job), self.waiting
        assert own is not None
        why = turn(own, self._room.line(), free_slots(nodes, occupied, cordoned))
        if not why and self._room.urgent():
            why = "behind a running job that replaces an instance"
        graph = NoRoom(why) if why else plan(self.job, self.spec, topology, nodes, occupied, cordoned)
        if isinstance(graph, NoRoom) and not (why and own.fits):  # does it fit the empty mesh?
            alone = plan(self.job, self.spec, topology, emptied(nodes), {}, cordoned)
            self._fits = not isinstance(alone, NoRoom)
            if isinstance(alone, NoRoom):
                return NoRoom(f"the whole mesh has no room for it, others go first: {alone.reason}")
        return graph

    async def _start(self, graph: TaskGraph) -> None:
        instances = self.instances
        for left in reversed(range(START_TRIES)):
            try:
                await self._outages.outlast("starting its instances", partial(self._start_missing, graph))
                return
            except StartFailed as failed:
                # a refusal is final; a death by signal may have had any cause
                if "killed by" not in failed.text or not left:
                    raise
                del instances.members[failed.member.sid]

    async def _start_missing(self, graph: TaskGraph) -> None:
        instances = self.instances
        await instances.start([unit for unit in graph.units if unit.sid not in instances.members])

    async def _without_node(self, lost: NodeLost) -> None:
        """Ends what was started and plans again; the lost node gets nothing until it registers again."""
        log.warning("node lost while deploying", job=self.job, agent=lost.agent, reason=lost.text)
        if lost.agent is not None:
            self._mesh.forget_node(lost.agent)
        await self._plan_again(lost.text)

    async def _plan_again(self, why: str) -> None:
        self._waits = True
        await self.journal.tell("fault", text=f"{why}; planned again")
        await self.instances.stop(now=True)
        self.instances.graph = None

    # --- the end ------------------------------------------------------------------------------------------
    async def _export(self) -> WeightsManifest:
        training = self.training
        return await export_weights(
            self._bus, self.job, self.spec, self.epoch, self.instances, training.stages(), training.step
        )

    async def _finish(self) -> WeightsManifest:
        await self.journal.move(JobState.FINISHING, "weights")
        while True:
            try:
                manifest = await self._outages.outlast("writing its weights", self._export)
                break
            except MemberLost as lost:
                self.training.losing(lost.members, str(lost))
                await self.training.until_whole()
                if self.training.step < self.spec.training.steps:  # a stage was lost: its steps run again
                    await self.training.run()
                await self.journal.move(JobState.FINISHING, "weights")
        await self.journal.note(now=True, weights=manifest)
        await self.journal.tell("weights", weights=manifest)
        if self.spec.sample is not None and self.spec.sample.tokens:
            text = await self.model_work.write_sample(manifest)
            if text:
                await self.journal.note(now=True, sample=text)
                await self.journal.tell("sample", sample=text)
        await self.checkpoints.finish()
        return manifest
