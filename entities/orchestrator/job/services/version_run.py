"""The life of a version's job: analysed, deployed, serving until it is stopped; adopted by a new leader.

It is a job's run in all that is not training: queue, placement, code, secrets, gateway, clean-up.
"""

from __future__ import annotations

from typing import Any, NoReturn

from bus.logs import get_logger
from bus.subjects import REGISTRY_RECORD
from bus.wire.correlation import correlate, current_cause
from entities.orchestrator.faults.fault_location import locate
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.job.parking import Parking
from entities.orchestrator.job.services.serving import Serving
from entities.orchestrator.job.term import TermContext
from entities.orchestrator.job_state.job_store import JobStore
from entities.orchestrator.job_state.retry_limits import Parked
from entities.orchestrator.membership.job_shape import JobShape
from entities.orchestrator.membership.slot_holding import SlotHolding
from entities.orchestrator.queue.job_queue import JobQueue
from schemas.errors import Conflict, NewerRecord, UnreadableRecord
from schemas.fault import FaultReport
from schemas.job import JobRecord, JobState
from schemas.recut import RecutAnswer, RecutJob
from schemas.registry import InstanceState, ServiceRecord
from schemas.step import Member

log = get_logger("orchestrator")

OVER = (InstanceState.FAULTED, InstanceState.GONE)
LEAVING = (InstanceState.DRAINING, *OVER)


class VersionRun(JobRun):
    """Drives the job of one version of a service; see `JobRun`."""

    def __init__(
        self,
        term: TermContext,
        queue: JobQueue,
        store: JobStore,
        gateway: str,
        parked: Parked | None = None,
    ) -> None:
        super().__init__(term, queue, store, gateway, parked)
        self.serving = Serving(self.job)
        deployment = self._deployment
        self.parking = Parking(
            self.job, self.serving, self._interrupt, parked, lambda: deployment.waiting is not None
        )
        self.holding = SlotHolding(
            self.job,
            self.serving,
            self.parking,
            waiting=lambda: deployment.waiting,
            placed_at=lambda: deployment.placed_at,
            leaving=lambda: self.serving.leaving,
            over=lambda: self.over,
        )
        self.shape = JobShape(self.job, self.serving.scale, deployment.forget_shape)

    # --- reports and requests ---------------------------------------------------------------------------
    async def fault(self, report: FaultReport) -> None:
        """Locates a fault that was reported about one of its instances; one that is at fault is replaced."""
        correlate(self.job.store.record.correlation, cause=current_cause())
        instances = self.job.instances
        member = instances.members.get(report.sid)
        if member is None or member.incarnation != report.incarnation or not instances.is_present(member):
            return
        fault = self.job.faults.reported(report, step=0, attempt=0)
        verdict = await locate(self.job.bus, self.job.mesh, self.name, member, instances.graph, report)
        if self.over:  # its faults were closed with the job
            return
        self.job.faults.located(fault, verdict)
        if verdict.verdict == "structural":
            self.serving.lost(member, f"{verdict.verdict} ({verdict.reason})")

    async def departure(self, record: ServiceRecord) -> None:
        """The registry says that an instance drains, has failed, or is gone: its unit starts elsewhere."""
        member = Member(sid=record.sid, incarnation=record.incarnation)
        if record.state in LEAVING and not self.over and self.job.instances.deployed is not None:
            self.serving.lost(member, record.reason or record.state.value)

    def drain(self, sid: str, left_s: float | None = None) -> str:
        """See `Serving.drain`. No session is lost with an instance, so a deadline changes nothing."""
        if self.over or sid not in self.job.instances.members:
            return "not running now"
        return self.serving.drain(sid)

    def move(self, sid: str, stage: int, by: str) -> str:
        raise self._serves("its instances change no stage: scale its stages (dmsc service scale)")

    async def recut(self, message: RecutJob) -> RecutAnswer:
        raise self._serves("it is not cut anew: deploy another version with other parallel.stages")

    def _serves(self, instead: str) -> Conflict:
        serve = self.job.spec.serve
        of = "" if serve is None else f"version {serve.version} of service {serve.service}"
        return Conflict(f"job {self.name} serves as {of}; {instead}")

    # --- the job's life ---------------------------------------------------------------------------------
    async def _work(self) -> NoReturn:
        """Serves until it is cancelled or parked."""
        store = self.job.store
        async with self.serving:
            if store.record.state is JobState.PARKED:
                await self._until_resumed()
                await self._deploy()
            elif self.job.epoch > 1 and await self._adopt():
                self.parking.taken_over(adopted=True)
            else:
                if self.job.epoch > 1:
                    await self._outages.outlast("freeing what it held", self.teardown.reclaim)
                    self.parking.taken_over(adopted=False)
                await store.move(JobState.ANALYSING, "layers, costs")
                await self._deploy()
            await store.move(JobState.RUNNING, self.serving.describe())
            self.job.queue.again()  # from now on it can be told to change its size, or to park
            await self.serving.run()
        raise AssertionError("a version serves until its run is ended")

    async def _deploy(self) -> None:
        topology = await self._outages.outlast("having the model analysed", self.model_analysis.analyse)
        if self.job.spec.parallel.auto:
            await self._choose_shape(topology)
        await self.job.gateway.until_routed()
        await self._deployment.deploy(topology)
        await self.job.store.tell("instances", instances=self.job.instances.views())

    async def _adopt(self) -> bool:
        """Goes on with the registered instances of an earlier orchestrator; False: none live.

        They keep their sessions: nothing of a request is the orchestrator's.
        """
        job, record = self.job, self.job.store.record
        if record.graph is None:
            return False
        job.instances.graph = record.graph
        living = await self._outages.outlast("looking for its instances", self._registered)
        if not living:
            job.instances.deployed = None
            return False
        job.instances.members = {member.sid: member for member in living}
        self._deployment.waits = False
        text = f"adopted {len(living)} of {len(record.graph.units)} instances in epoch {job.epoch}"
        await job.store.move(JobState.RECOVERING, text)
        await job.gateway.choose(record.graph)
        await job.store.tell("recovery", text=text)
        await job.store.tell("instances", instances=job.instances.views())
        return True

    async def _registered(self) -> list[Member]:
        """The incarnations of its units that are ready, as the registry has them."""
        living = []
        for unit in self.job.instances.graph.units:
            try:
                entry = await self.job.bus.bucket(REGISTRY_RECORD).get(sid=unit.sid)
            except (UnreadableRecord, NewerRecord) as error:  # it counts as lost, and is replaced
                log.warning("not adopted", job=self.name, sid=unit.sid, reason=error.text)
                continue
            found = None if entry is None else entry.message
            if isinstance(found, ServiceRecord) and found.state is InstanceState.ACTIVE:
                living.append(Member(sid=found.sid, incarnation=found.incarnation))
        return living

    async def _park(self, reason: str) -> None:
        """Frees all that the version holds; the record is changed last, see `JobRun`."""
        log.warning("version parked", job=self.name, reason=reason)
        await self.teardown.park()
        changes: dict[str, Any] = (
            {"held": reason} if self.parked is not None and self.parked.by_person else {}
        )
        await self.job.store.move(JobState.PARKED, reason, **changes)
        await self.job.store.tell("recovery", text=f"parked: {reason}")


def run_type(record: JobRecord) -> type[JobRun]:
    """What drives this job."""
    return JobRun if record.spec.serve is None else VersionRun
