"""Termination and clean-up of a job (draft §4.4(6)).

MG and SR report their termination, SMO stops the instances, SRD releases the routes, MIC forgets the
topology.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import FORGET_TOPOLOGY, RELEASE_JOB
from entities.orchestrator.checkpointing.checkpoints import Checkpoints
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.job_secrets import forget_secrets
from entities.orchestrator.job_state.link_secret import forget_link_secret
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import ForgetTopology
from schemas.envelope import EntityKind
from schemas.errors import DmscError
from schemas.registry import ReleaseJob
from schemas.secrets import references_of
from schemas.signals import TerminationReport

log = get_logger("orchestrator")


class Teardown:
    """Cleans up one job: `run` when it is over, `reclaim` before another orchestrator starts it afresh."""

    def __init__(self, job: JobContext, checkpoints: Checkpoints) -> None:
        self._job = job
        self._times = job.times.run
        self._checkpoints = checkpoints
        self._terminated: set[str] = set()
        self._termination = asyncio.Event()

    def terminated(self, report: TerminationReport) -> None:
        self._terminated.add(report.sid)
        self._termination.set()

    async def run(self) -> None:
        """Cleans up all parts; logs the failure of one part, and goes on with the others."""
        steps: Sequence[tuple[str, Callable[[], Awaitable[None]]]] = (
            ("termination", self._end_communication),
            ("instances", self._job.instances.stop),
            ("checkpoints", self._checkpoints.close),
            ("registry", self._release),
            ("topology", self._forget),
            ("link secret", lambda: forget_link_secret(self._job.bus, self._job.name)),
            ("secrets", lambda: forget_secrets(self._job.bus, references_of(self._job.spec).values())),
        )
        for name, step in steps:
            try:
                await step()
            except Exception as error:  # the other parts are cleaned up all the same
                known = isinstance(error, DmscError)
                log.warning(
                    "clean-up incomplete",
                    job=self._job.name,
                    part=name,
                    reason=str(error),
                    exc_info=None if known else error,
                )

    async def park(self) -> None:
        """Ends the job's instances, so that their slots are free.

        If that fails, their agents end them before an instance of the next epoch starts in the same slot.
        """
        for name, step in (("instances", self._job.instances.stop(now=True)), ("registry", self._release())):
            try:
                await step
            except DmscError as error:
                log.warning("not parked in order", job=self._job.name, part=name, reason=str(error))

    async def reclaim(self) -> None:
        """Ends what is left of a job that an earlier orchestrator left open, before it starts afresh.

        Its old instances hold slots, so they have to end before new ones start.

        Raises:
            Unavailable: the registry does not answer, or can't write.
        """
        await self.agents_back()
        await self._release()
        await self._forget()

    async def agents_back(self) -> None:
        """Waits until the agents of the job's nodes have registered here, which takes seconds."""
        graph = self._job.store.record.graph
        places = {(place.cluster, place.node) for place in graph.placements} if graph else set()

        def back() -> bool:
            return all(self._job.mesh.agent_of(cluster, node) is not None for cluster, node in places)

        await self._job.mesh.until(back, self._times.agents_back_s)

    async def _end_communication(self) -> None:
        graph = self._job.store.record.graph
        if self._job.policies.policy is not None:
            self._job.policies.revise("the job has ended", ended=True)
        elif graph is not None and self._job.store.record.ends_as is not None:
            self._job.gateway.end(graph)
        else:
            return
        expected = {*self._job.mesh.gateways(), *self._job.mesh.routers()}
        try:
            async with asyncio.timeout(self._times.termination_s):
                while not expected <= self._terminated:
                    self._termination.clear()
                    await self._termination.wait()
        except TimeoutError:
            log.warning("no termination report", job=self._job.name, of=sorted(expected - self._terminated))

    async def _release(self) -> None:
        order = ReleaseJob(job=self._job.name)
        await self._job.bus.command(RELEASE_JOB, order, deadline_s=self._times.answer_s, while_heard=True)

    async def _forget(self) -> None:
        await forget_at_nodes(self._job.bus, self._job.mesh, self._job.name, self._times.answer_s)


class LeftInstances:
    """Ends what is left of jobs that have ended.

    A leader may have been killed at a job's end, and an agent may have been away when its successor cleaned
    up: the instances there would hold their slots for ever.

    Args:
        ended: jobs that have ended, by id.
        running: jobs that have not: nothing of another one is to run.
        look_every_s: what is there at two looks is left, and not just about to end.
    """

    def __init__(
        self,
        bus: Bus,
        mesh: MeshView,
        ended: Mapping[str, object],
        running: Mapping[str, object],
        *,
        look_every_s: float = 5.0,
        answer_s: float = 10.0,
    ) -> None:
        self._bus = bus
        self._mesh = mesh
        self._ended = ended
        self._running = running
        self._look_every_s = look_every_s
        self._answer_s = answer_s

    async def run(self) -> None:
        """Looks again and again, until cancelled."""
        before = set[tuple[str, str]]()
        while True:
            left = set(self._left())
            for agent, job in sorted(left & before):
                log.warning("instances of an ended job are left: they end", job=job, agent=agent)
                order = ForgetTopology(job=job)
                with contextlib.suppress(DmscError):  # it is looked at again
                    await self._bus.command(FORGET_TOPOLOGY, order, deadline_s=self._answer_s, agent=agent)
            before = left
            await asyncio.sleep(self._look_every_s)

    def _left(self) -> Iterator[tuple[str, str]]:
        """Agents with instances of jobs that have ended, and these jobs."""
        for record in self._mesh.of_kind(EntityKind.INSTANCE):
            if record.job is None or record.job not in self._ended or record.job in self._running:
                continue
            if not self._mesh.runs(record.sid):
                continue
            agent = self._mesh.agent_of(record.endpoint.cluster, record.endpoint.node)
            if agent is not None:
                yield agent, record.job


async def forget_at_nodes(bus: Bus, mesh: MeshView, job: str, within_s: float) -> None:
    """Has each node agent end what is left of a job or a build; one that does not answer is passed over."""
    orders = (
        bus.command(
            FORGET_TOPOLOGY, ForgetTopology(job=job), deadline_s=within_s, while_heard=True, agent=agent
        )
        for agent in sorted(mesh.nodes)
    )
    await asyncio.gather(*orders, return_exceptions=True)
