"""One job's life (draft §4.4): analyse, plan, deploy, train, finish, clean up; and recover in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from bus.connection import Bus
from bus.logs import bind, get_logger
from bus.tasks import cancel
from bus.wire.correlation import correlate, current_cause
from entities.orchestrator.checkpointing.checkpoints import Checkpoints
from entities.orchestrator.faults.fault_location import locate
from entities.orchestrator.faults.fault_queue import FaultQueue
from entities.orchestrator.faults.job_faults import JobFaults
from entities.orchestrator.job.bus_outages import BusOutages
from entities.orchestrator.job.deployment import Deployment
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
)
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.policy_distribution import PolicyDistribution
from entities.orchestrator.job_state.retry_limits import Parked
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.queue.job_queue import Waiting
from entities.orchestrator.queue.slot_demand import SlotDemand
from schemas.errors import Conflict, DmscError, Fenced, NewerRecord, Unavailable
from schemas.fault import FaultReport
from schemas.job import JobRecord, JobState, WeightsManifest
from schemas.registry import InstanceState, ServiceRecord
from schemas.stage_move import MoveForecast
from schemas.step import Member
from schemas.task_graph import Placement

log = get_logger("orchestrator")

CLEAN_UP_S = 3.0
"""A whole mesh may be stopping: then nobody is left who would answer."""
REPORTED_S = 2.0
"""How long MG and SR have to report a failure that the registry knows, before it is taken up without them."""


class JobRun:
    """Drives one job: to its end, or until it has to be parked (`parked`: why).

    Args:
        room: what other jobs hold, and wait for.
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
        self.claimed = self.training.claimed
        self.model_work = ModelAnalysis(bus, mesh, journal)
        self.clean_up = Teardown(
            bus, mesh, journal, self.instances, self.checkpoints, self.communication, self.entry
        )
        self._deployment = Deployment(
            mesh,
            journal,
            self.instances,
            self.entry,
            room,
            self._outages,
            waits=record.ends_as is None and not record.held,
        )
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
        """How it ends is certain; what is left is to clean up."""
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
        """Its place in the queue; None: it has instances, or is held back for another reason than room."""
        return None if self.over else self._deployment.waiting

    @property
    def step(self) -> int:
        """The step that is open."""
        return self.training.step

    # --- what the service hands in ------------------------------------------------------------------------
    async def fault(self, report: FaultReport) -> None:
        """MG or SR reported something about one of this job's instances: locate it, then act on it."""
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
            return  # fenced itself: its neighbours closed their links on purpose
        if report.silent and witness is not None:
            self.training.silence(witness, member)
        self._reported.add(key)
        fault = self._faults.reported(report, step=self.step, attempt=self.training.attempt)
        verdict = await locate(self._bus, self._mesh, self.instances, self.job, member, report)
        if self._over.is_set():  # its faults were closed with the job
            return
        self._faults.located(fault, verdict)
        text = f"{verdict.verdict} ({verdict.reason}); {verdict.action}"
        if verdict.verdict == "structural":
            self.training.lost(member, verdict.reason, text)
            return
        self._reported.discard(key)
        if self.instances.is_present(member):  # else its loss was told while it was asked about
            await self.journal.tell("fault", text=f"{member.sid}: {text}")

    def drain(self, sid: str) -> str:
        """Has an instance leave its node; what stands in the way, or ''.

        A replica of its stage hands the state on to its next incarnation; where there is none, a checkpoint
        of that very step does. Asked again until it is gone.
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
        """Its record, with what has just been asked for and is not written yet."""
        record, graph = self.journal.record, self.instances.graph
        return record if graph is None else record.model_copy(update={"graph": graph})

    def scale(self, stage: int | None, replicas: int) -> str:
        """See `Training.scale`; without a stage, all of them."""
        if self.journal.record.state is not JobState.RUNNING:
            raise Conflict(f"job {self.job} is {self.journal.record.state}; only a running one can be scaled")
        stages = range(self.spec.parallel.stages) if stage is None else [stage]
        return "; ".join(self.training.scale(one, replicas) for one in stages)

    async def leaving(self, record: ServiceRecord) -> None:
        """The registry says that an instance drains, has failed, or is gone.

        Whoever was told to go is not this job's any more. One that takes leave by itself (its node agent
        ends, and its instances with it) is no fault that MG or SR would report. A failure they do report,
        unless they died with it.
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
        """Ends the job; everything is cleaned up. Returns once that can't be lost any more."""
        if self._cancelled is None and not self.over:
            self._cancelled = reason
            ends = self.journal.note(now=True, ends_as=JobState.CANCELLED, ends_because=reason)
            await written_down(ends)
            if self._task is not None and self.parked is None:  # else the next run ends it
                self._task.cancel()

    async def shut_down(self, *, deposed: bool) -> None:
        """The orchestrator stops: the record stays as it is, so that the next start resumes the job.

        One that is over is given a moment to clean up, unless that is another orchestrator's by now.
        """
        self.parking.interrupted = False  # this is the end of the run, and not of the job's training
        if self._task is not None and not self._task.done():
            if self.over and not deposed:
                await asyncio.wait({self._task}, timeout=CLEAN_UP_S)
            await cancel(self._task)

    # --- the job's life -----------------------------------------------------------------------------------
    async def run(self) -> None:
        """Runs to an end. Cancelled from outside without `cancel` (shutdown), the record stays as it is."""
        self._task = asyncio.current_task()
        bind(job=self.job, step=lambda: self.step)
        correlate(self.journal.record.correlation)
        try:
            await self._to_the_end()
        finally:
            self.parking.stop()
            await self.communication.close()

    def _interrupt(self) -> bool:
        """What is in no checkpoint is computed again when the job goes on. False: the run is at its end."""
        if self._cancelled is not None or self.parked is not None or self.over:
            return False
        if self._task is not None:
            self._task.cancel()
        return True

    async def _to_the_end(self) -> None:
        record = self.journal.record
        try:
            if record.ends_as is not None:  # under an orchestrator before: what is left of it goes
                state, reason = record.ends_as, record.ends_because
                await self.clean_up.agents_back()
            else:
                state, reason = await self._outcome()
            if state is JobState.PARKED:
                await self._park(reason)
                return
            self._over.set()
            with contextlib.suppress(Unavailable):
                # also makes sure that it is ours: what follows carries no epoch
                await self.journal.note(now=True, ends_as=state, ends_because=reason)
        except Fenced as error:
            log.error("another orchestrator has this job", job=self.job, reason=str(error))
            await self.checkpoints.abandon()
            return
        except NewerRecord:
            await self.checkpoints.abandon()
            raise
        self._faults.ended(state is JobState.DONE, reason)
        await self.clean_up.run()  # left off, it is the next leader's: the record says how the job ends
        await self.journal.move(state, reason)

    async def _outcome(self) -> tuple[JobState, str]:
        """Works; returns how that ended, and why.

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
            return self._as_parked(Parked(self.parking.held or "parked", for_room=False))
        except Fenced:
            raise
        except NewerRecord:
            raise
        except Parked as parked:
            return self._as_parked(parked)
        except Unavailable as error:  # of the mesh, not of the job: whoever mends it has it go on
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
        """Frees all that the job holds; what it has trained is in its checkpoints.

        The record says so last: until then it is a job that an orchestrator left behind.
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
                await self._deploy()
            elif self.epoch > 1 and await self._adopt():
                self.parking.taken_over(adopted=True)
            else:
                if self.epoch > 1:
                    await self._outages.outlast("freeing what it held", self.clean_up.reclaim)
                    self.parking.taken_over(adopted=False)
                await self.journal.move(JobState.ANALYSING, "layers, costs, data")
                await self._deploy()
            await self._train()
            return await self._finish()

    async def _deploy(self) -> None:
        """Analyses the model, and starts the instances in their slots."""
        topology = await self._outages.outlast("having the model analysed", self.model_work.analyse)
        await self._deployment.deploy(topology)
        await self.training.begin()
        await self.journal.tell("instances", instances=self.instances.views())

    async def _until_resumed(self) -> None:
        if self.parking.waits:
            self._deployment.waits = False
            await self.parking.until_resumed()
            self._deployment.waits = True

    async def _adopt(self) -> bool:
        """Goes on with the living instances that an orchestrator before this one left; False: none live."""
        record = self.journal.record
        if record.graph is None:
            return False
        self.instances.graph = record.graph
        adoption = TakeoverService(self._bus, self._mesh, self.instances, self.training.record, self.epoch)
        settled = await self._outages.outlast("looking for its instances", adoption.settle)
        if settled is None:
            if self.training.record.unknown:
                text = "nobody can read what was decided last: all back to the checkpoint"
                await self.journal.tell("recovery", text=text)
            self.instances.graph = None
            return False
        self._deployment.waits = False
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
                if self.training.step < self.spec.training.steps:  # a stage was lost: steps are run again
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
