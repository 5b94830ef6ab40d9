"""One job's life (draft §4.4): analyse, plan, deploy, train, finish, clean up; and recover in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from bus.artifacts import open_artifacts
from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import ANALYSE, CHECKPOINT, FORGET_TOPOLOGY, RELEASE_JOB, WRITE_SAMPLE
from entities.orchestrator.communication import Communication
from entities.orchestrator.instances import Instances, MemberLost, StartFailed
from entities.orchestrator.journal import Journal
from entities.orchestrator.mesh_view import MeshView
from entities.orchestrator.placement import NoRoom
from entities.orchestrator.planning import first_policy, plan
from entities.orchestrator.recovery import OccupiedFn, Recovery, checkpoint_url, locate, restore_all
from entities.orchestrator.results import export_weights
from entities.orchestrator.setbacks import Setbacks, Unrecoverable
from entities.orchestrator.step_loop import AttemptFailed, EntryLost, StepLoop
from schemas.cluster import Analyse, AnalysisFailed, ForgetTopology, SampleWritten, WriteSample
from schemas.errors import BadModel, DmscError, Fenced, Unavailable
from schemas.fault import FaultReport
from schemas.job import JobState, StepResult, WeightsManifest
from schemas.registry import ReleaseJob
from schemas.signals import TerminationReport
from schemas.step import CheckpointOrder, Member, MicrobatchClaim, StepDecision
from schemas.task_graph import ModelTopology

log = get_logger("orchestrator")

ANALYSIS_DEADLINE_S = 180.0
ANALYSTS = 3
"""Node agents asked to analyse, one after the other, before the job fails."""
CHECKPOINTS_KEPT = 2
"""The last, and the one before in case that the last is damaged."""
SAMPLE_DEADLINE_S = 90.0
CHECKPOINT_DEADLINE_S = 300.0
TERMINATION_DEADLINE_S = 5.0
AGENTS_BACK_S = 12.0
"""How long a restarted orchestrator waits for the agents of a job: they repeat themselves every 5 s."""
GATEWAY_BACK_S = 20.0
"""How long a job waits for any gateway."""
DEPLOY_TRIES = 3
RECOVERY_TRIES = 8
"""Recoveries in a row, each broken by a new loss, before the job fails."""


class JobRun:
    """Drives one job. `occupied` tells which slots other jobs were promised, by node agent."""

    def __init__(
        self, bus: Bus, mesh: MeshView, journal: Journal, gateway: str, occupied: OccupiedFn
    ) -> None:
        record = journal.record
        self._bus = bus
        self._mesh = mesh
        self._gateway = gateway
        self._occupied = occupied
        self.journal = journal
        self.job = record.job
        self.spec = record.spec
        self.epoch = record.epoch
        self.communication = Communication(bus, mesh)
        self.instances = Instances(bus, mesh, self.job, self.spec, self.epoch)
        self.loop = StepLoop(bus, self.job, self.spec, self.epoch, self.instances)
        self.recovery = Recovery(bus, mesh, self.instances, journal, self.epoch, occupied)
        self.setbacks = Setbacks()
        self.step = 0
        self._topology: asyncio.Future[ModelTopology] = asyncio.get_running_loop().create_future()
        self._sample: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._terminated: set[str] = set()
        self._termination = asyncio.Event()
        self._fault = asyncio.Event()
        self._fault_text = ""
        self._reported: set[tuple[str, str, str]] = set()
        self._cancelled: str | None = None
        self._checkpoints = [] if record.checkpoint_step is None else [record.checkpoint_step]
        self._checkpoint_tried = -1
        self.over = False
        self._task: asyncio.Task[None] | None = None

    # --- what the service hands in ------------------------------------------------------------------------
    def topology(self, message: ModelTopology) -> None:
        if not self._topology.done():
            self._topology.set_result(message)

    def analysis_failed(self, message: AnalysisFailed) -> None:
        if not self._topology.done():
            self._topology.set_exception(BadModel(message.text))

    def sample_written(self, message: SampleWritten) -> None:
        if not self._sample.done():
            self._sample.set_result(message.text)

    def claimed(self, claim: MicrobatchClaim) -> None:
        self.loop.claimed(claim)

    def terminated(self, report: TerminationReport) -> None:
        self._terminated.add(report.sid)
        self._termination.set()

    async def fault(self, report: FaultReport) -> None:
        """MG or SR reported something about one of this job's instances: locate it, then act on it."""
        member = self.instances.members.get(report.sid)
        key = (report.sid, report.incarnation, report.kind)
        if member is None or member.incarnation != report.incarnation or member in self.instances.lost:
            return
        if report.kind == "instance" and key in self._reported:
            return
        self._reported.add(key)
        verdict = await locate(self._bus, self._mesh, self.instances, self.job, member, report)
        await self.journal.tell(
            "fault", text=f"{member.sid}: {verdict.verdict} ({verdict.reason}); {verdict.action}"
        )
        self._fault_text = f"{member.sid}: {verdict.reason}"
        if verdict.verdict == "structural":
            self.instances.mark_lost(member)
            self._fault.set()
        elif verdict.verdict == "transient":
            self._fault.set()
        else:
            self._reported.discard(key)

    def cancel(self, reason: str) -> None:
        """Ends the job; everything is cleaned up."""
        if self._cancelled is None and not self.over:
            self._cancelled = reason
            if self._task is not None:
                self._task.cancel()

    async def shut_down(self) -> None:
        """The orchestrator stops: the record stays as it is, so that the next start resumes the job."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # --- the job's life -----------------------------------------------------------------------------------
    async def run(self) -> None:
        """Runs to an end. Cancelled from outside without `cancel` (shutdown), the record stays as it is."""
        self._task = asyncio.current_task()
        state, reason = JobState.FAILED, ""
        try:
            if self._cancelled is not None:
                raise asyncio.CancelledError
            manifest = await self._work()
            state = JobState.DONE
            reason = f"weights {manifest.sha256[:12]}"
        except asyncio.CancelledError:
            if self._cancelled is None:
                await self.instances.stop()
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # we are inside a task
            state, reason = JobState.CANCELLED, self._cancelled
        except Fenced as error:
            log.error("another orchestrator has this job", job=self.job, reason=str(error))
            return
        except DmscError as error:
            reason = error.text
        except Exception as error:
            log.error("job failed on an internal error", job=self.job, exc_info=error)
            reason = f"internal error: {type(error).__name__}: {error}"
        self.over = True
        try:
            await self._clean_up()
        finally:
            await self.journal.move(state, reason)

    async def _work(self) -> WeightsManifest:
        if self.epoch > 1:
            await self._reclaim()
        await self.journal.move(JobState.ANALYSING, "layers, costs, data")
        topology = await self._analyse()
        await self._deploy(topology)
        await self._train()
        return await self._finish()

    async def _reclaim(self) -> None:
        """An orchestrator before this one left the job open: its instances end before new ones start.

        They would refuse this epoch's orders, and hold their slots. What the job lost is the steps since
        its last checkpoint; the exact takeover of living instances is another protocol.
        """
        graph = self.journal.record.graph
        places = {(one.cluster, one.node) for one in graph.placements} if graph else set()

        def back() -> bool:
            return all(self._mesh.agent_of(cluster, node) is not None for cluster, node in places)

        await self._mesh.until(back, AGENTS_BACK_S)
        await self._release()
        await self._forget()

    async def _analyse(self) -> ModelTopology:
        """A node agent of the job's clusters analyses the model (§5.3)."""
        if not await self._mesh.until(lambda: bool(self._agents()), 0):
            await self.journal.reason("no node has joined: waiting")
            while not self._agents():
                await self._mesh.next_change()
        order = Analyse(job=self.job, spec=self.spec)
        asked: list[str] = []
        for _ in range(ANALYSTS):
            agent = next((sid for sid in self._agents() if sid not in asked), None)
            if agent is None:
                break
            asked.append(agent)
            await self._bus.command(ANALYSE, order, deadline_s=20.0, agent=agent)
            gone = asyncio.create_task(self._mesh.until(partial(self._has_left, agent), ANALYSIS_DEADLINE_S))
            try:
                await asyncio.wait([self._topology, gone], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var]
            finally:
                gone.cancel()
            if self._topology.done():
                return self._topology.result()
            log.warning("no topology, asking another node", job=self.job, agent=agent)
        raise Unavailable(f"no topology from {', '.join(asked) or 'any node'}")

    def _has_left(self, agent: str) -> bool:
        return agent not in self._mesh.nodes

    def _agents(self) -> list[str]:
        wanted = self.spec.parallel.clusters
        return sorted(
            (sid for sid, node in self._mesh.nodes.items() if not wanted or node.cluster in wanted),
            key=lambda sid: (not self._mesh.nodes[sid].warm, sid),
        )

    async def _deploy(self, topology: ModelTopology) -> None:
        instances = self.instances
        instances.code_digest = topology.code_digest
        instances.layer_count = len(topology.layers)
        while True:
            occupied = self._occupied(self.job)
            graph = plan(self.job, self.spec, topology, list(self._mesh.nodes.values()), occupied)
            if not isinstance(graph, NoRoom):
                break
            if self.journal.record.state is not JobState.QUEUED:
                await self.journal.move(JobState.QUEUED, graph.reason)
            else:
                await self.journal.reason(graph.reason)
            await self._mesh.next_change()
        instances.graph = graph
        if self.journal.record.state is JobState.QUEUED:
            await self.journal.move(JobState.ANALYSING, "room was found")
        await self.journal.move(JobState.DEPLOYING, graph.reason, graph=graph)
        await self._choose_entry(first=True)
        for tries in range(DEPLOY_TRIES):
            try:
                await instances.start([unit for unit in graph.units if unit.sid not in instances.members])
                break
            except StartFailed as failed:
                # a refusal is final; a death by signal may have been anything
                if "killed by" not in failed.text or tries == DEPLOY_TRIES - 1:
                    raise
                del instances.members[failed.member.sid]
        self.step = version = self.journal.record.checkpoint_step or 0
        try:
            if version:
                url = checkpoint_url(self.spec.artifacts, self.job, version)
                await restore_all(self.job, self.epoch, instances, url, version)
                await self.journal.tell("recovery", text=f"resumed from the checkpoint of step {version}")
            await self.loop.form_groups()
        except DmscError as error:  # somebody died between start and group
            await self._recover(error)
        await self.journal.tell("instances", instances=instances.views())

    async def _choose_entry(self, *, first: bool = False) -> None:
        """The gateway that took the job dispatches for it; another one if it is gone."""
        # after a restart of the orchestrator they register again by themselves, within 10 s
        if not await self._mesh.until(lambda: bool(self._mesh.gateways()), GATEWAY_BACK_S):
            raise Unavailable(f"no gateway registered within {GATEWAY_BACK_S:.0f} s")
        gateways = self._mesh.gateways()
        present = self.loop.entry_gateway
        if first:
            entry = self._gateway if self._gateway in gateways else gateways[0]
            assert self.instances.graph is not None
            revision = int(time.time() * 1e3)  # above any revision of an earlier start of this job
            await self.communication.issue(first_policy(self.job, self.instances.graph, entry, revision))
        else:
            others = [sid for sid in gateways if sid != present]
            entry = others[0] if others else present
            await self.communication.revise(f"gateway {present} does not answer", entry_gateway=entry)
        self.loop.entry_gateway = entry

    # --- training -----------------------------------------------------------------------------------------
    async def _train(self) -> None:
        training = self.spec.training
        await self.journal.move(JobState.RUNNING, f"step {self.step} of {training.steps}")
        decided_at = time.monotonic()
        begun: asyncio.Task[None] | None = None
        ledger = self.loop.open(self.step)
        while self.step < training.steps:
            try:
                decision = await self._unless_fault(self.loop.gather(ledger, begun=begun is not None))
            except (MemberLost, AttemptFailed) as error:
                await self._recover(error)
                ledger, begun = self.loop.open(self.step), None
                continue
            await self.loop.record(decision)
            now = time.monotonic()
            result = self.loop.result(ledger, decision, now - decided_at)
            decided_at = now
            ahead = decision.step + 1
            pause = ahead >= training.steps or self._validation_due(ahead) or self._checkpoint_due(ahead)
            ledger = self.loop.open(ahead)
            begun = None if pause else asyncio.create_task(self.loop.begin(ahead))
            try:
                silent = await self.loop.commit(decision)
                self.step = ahead
                self.setbacks.committed(decision.step)
                await self._tell_step(result)
                if begun is not None:
                    await self._unless_fault(begun)  # a gateway waits for a dead data instance's answer
            except (MemberLost, AttemptFailed) as error:
                await self._recover(error)
                ledger, begun = self.loop.open(self.step), None
                continue
            finally:
                if begun is not None and not begun.done():
                    begun.cancel()
            if silent or self._fault.is_set():
                await self._recover(
                    MemberLost(self._by_sid(silent), f"after step {decision.step}: {sorted(silent)}")
                )
                ledger, begun = self.loop.open(self.step), None
            if pause:
                moved = await self._between_steps()
                if moved:
                    ledger, begun = self.loop.open(self.step), None

    async def _between_steps(self) -> bool:
        """Validation and checkpoint at a step boundary; True if a recovery was needed on the way."""
        recovered = False
        while True:
            try:
                if self._validation_due(self.step):
                    await self._unless_fault(self._validate())
                if self._checkpoint_due(self.step):
                    await self._unless_fault(self._checkpoint())
                return recovered
            except (MemberLost, AttemptFailed) as error:
                await self._recover(error)
                recovered = True

    async def _unless_fault(self, work: Awaitable[StepDecision | None]) -> StepDecision:
        """Runs `work`, giving it up as soon as a fault is confirmed."""
        task = asyncio.ensure_future(work)
        fault = asyncio.create_task(self._fault.wait())
        try:
            await asyncio.wait({task, fault}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()  # type: ignore[return-value]  # None only for those who ignore it
            raise MemberLost(self.instances.lost, self._fault_text)
        finally:
            fault.cancel()
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _recover(self, error: DmscError) -> None:
        """Brings the job back to running; `self.step` is where it goes on.

        Raises:
            Unrecoverable: it can't be brought back, or what broke it breaks it each time.
        """
        if isinstance(error, MemberLost):
            for member in error.members:
                self.instances.mark_lost(member)
        else:
            await self.journal.tell("fault", text=str(error))
            if isinstance(error, EntryLost):
                await self._choose_entry()
        began, broken = time.monotonic(), self.step
        names = sorted(
            member.sid for member in self.instances.members.values() if member in self.instances.lost
        )
        why = f"lost {', '.join(names)}" if names else str(error)
        self.setbacks.attempt_failed(broken, why)
        self.setbacks.ended(broken, await self.recovery.last_words())
        await self.journal.move(JobState.RECOVERING, why, recoveries=self.journal.record.recoveries + 1)
        for tries in range(RECOVERY_TRIES):
            self._fault.clear()
            self.loop.attempt += 1
            self.step = await self.recovery.restore(self.step, self.loop.attempt)
            self.setbacks.ended(broken, await self.recovery.last_words())
            try:
                await self.loop.form_groups()
            except MemberLost as lost:
                for member in lost.members:
                    self.instances.mark_lost(member)
                continue
            except DmscError as failed:  # somebody is dying whose death is not known yet
                if tries == RECOVERY_TRIES - 1:
                    raise
                log.warning("group not formed", job=self.job, reason=str(failed))
                continue
            if not self._fault.is_set():
                break
        else:
            raise Unrecoverable(f"the job lost members in {RECOVERY_TRIES} recoveries in a row; last: {why}")
        await self.journal.tell("instances", instances=self.instances.views())
        await self.journal.tell(
            "recovery", text=f"{why}: back after {time.monotonic() - began:.2f} s at step {self.step}"
        )
        await self.journal.move(JobState.RUNNING, f"step {self.step} of {self.spec.training.steps}")

    def _by_sid(self, sids: set[str]) -> list[Member]:
        return [self.instances.members[sid] for sid in sorted(sids) if sid in self.instances.members]

    async def _tell_step(self, result: StepResult) -> None:
        first = self.journal.record.loss_first
        await self.journal.note(
            step=self.step,
            loss_first=result.loss if first is None else first,
            loss_last=result.loss,
            tokens_per_s=result.tokens_per_s,
        )
        await self.journal.tell("step", result=result)

    def _validation_due(self, step: int) -> bool:
        training = self.spec.training
        if not training.validation_microbatches or not self.spec.data.validation_fraction:
            return False
        if step == training.steps:
            return True
        return bool(training.validate_every) and step % training.validate_every == 0

    def _checkpoint_due(self, step: int) -> bool:
        every = self.spec.training.checkpoint_every
        known = (self.journal.record.checkpoint_step, self._checkpoint_tried)
        return bool(every) and step % every == 0 and step not in known

    async def _validate(self) -> None:
        evaluated = await self.loop.evaluate(self.step)
        await self.journal.note(validation_loss=evaluated.mean)
        await self.journal.tell("validation", validation_step=self.step, validation_loss=evaluated.mean)

    async def _checkpoint(self) -> None:
        url = checkpoint_url(self.spec.artifacts, self.job, self.step)
        order = CheckpointOrder(job=self.job, epoch=self.epoch, version=self.step, url=url)
        first = [members[0] for members in self.instances.stages()]
        self._checkpoint_tried = self.step
        try:
            await self.instances.order(CHECKPOINT, order, first, deadline_s=CHECKPOINT_DEADLINE_S)
        except MemberLost:
            self._checkpoint_tried = -1
            raise
        except DmscError as error:  # the store is full or away: training goes on, the one before still counts
            log.warning("no checkpoint", job=self.job, step=self.step, reason=str(error))
            await self.journal.tell("checkpoint", text=f"step {self.step}: not written: {error}")
            return
        await self.journal.note(now=True, checkpoint_step=self.step)
        await self.journal.tell("checkpoint", text=f"step {self.step} at {url}")
        self._checkpoints = [*(one for one in self._checkpoints if one < self.step), self.step]
        while len(self._checkpoints) > CHECKPOINTS_KEPT:
            old = checkpoint_url(self.spec.artifacts, self.job, self._checkpoints.pop(0))
            try:
                await open_artifacts(old, self._bus).delete()
            except DmscError as error:
                log.warning("old checkpoint not removed", job=self.job, url=old, reason=str(error))

    # --- the end ------------------------------------------------------------------------------------------
    async def _finish(self) -> WeightsManifest:
        await self.journal.move(JobState.FINISHING, "weights")
        while True:
            try:
                manifest = await export_weights(
                    self._bus, self.job, self.spec, self.epoch, self.instances, self.step
                )
                break
            except MemberLost as lost:
                await self._recover(lost)
                if self.step < self.spec.training.steps:  # a whole stage was lost: its steps are run again
                    await self._train()
                await self.journal.move(JobState.FINISHING, "weights")
        await self.journal.note(now=True, weights=manifest)
        await self.journal.tell("weights", weights=manifest)
        if self.spec.sample is not None and self.spec.sample.tokens:
            text = await self._write_sample(manifest)
            if text:
                await self.journal.note(now=True, sample=text)
                await self.journal.tell("sample", sample=text)
        return manifest

    async def _write_sample(self, manifest: WeightsManifest) -> str:
        """A courtesy at the end: its failure is told, and fails nothing."""
        agents = self._agents()
        if not agents:
            return ""
        order = WriteSample(job=self.job, spec=self.spec, weights_url=manifest.url)
        try:
            await self._bus.command(WRITE_SAMPLE, order, deadline_s=10.0, agent=agents[0])
            async with asyncio.timeout(SAMPLE_DEADLINE_S):
                return await self._sample
        except (DmscError, TimeoutError) as error:
            log.warning("no sample", job=self.job, reason=str(error) or "timed out")
            return ""

    async def _clean_up(self) -> None:
        """Draft §4.4(6): MG and SR report, SMO stops instances, SRD releases, MIC drops the topology."""
        steps: Sequence[tuple[str, Callable[[], Awaitable[None]]]] = (
            ("termination", self._end_communication),
            ("instances", self.instances.stop),
            ("registry", self._release),
            ("topology", self._forget),
        )
        for name, step in steps:
            try:
                await step()
            except DmscError as error:
                log.warning("clean-up incomplete", job=self.job, part=name, reason=str(error))

    async def _end_communication(self) -> None:
        if self.communication.policy is None:
            return
        await self.communication.revise("the job has ended", ended=True)
        expected = {*self._mesh.gateways(), *self._mesh.routers()}
        try:
            async with asyncio.timeout(TERMINATION_DEADLINE_S):
                while not expected <= self._terminated:
                    self._termination.clear()
                    await self._termination.wait()
        except TimeoutError:
            log.warning("no termination report", job=self.job, of=sorted(expected - self._terminated))

    async def _release(self) -> None:
        await self._bus.command(RELEASE_JOB, ReleaseJob(job=self.job), deadline_s=10.0)

    async def _forget(self) -> None:
        agents = set(self._mesh.nodes)
        await asyncio.gather(
            *(
                self._bus.command(FORGET_TOPOLOGY, ForgetTopology(job=self.job), deadline_s=10.0, agent=agent)
                for agent in sorted(agents)
            ),
            return_exceptions=True,
        )
