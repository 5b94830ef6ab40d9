"""What node agents work out about a job's model: its topology before it is placed (§5.3), a sample when it is
trained."""

from __future__ import annotations

import asyncio
import contextlib

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import ANALYSE, WRITE_SAMPLE
from entities.orchestrator.job_secrets import secrets_for
from entities.orchestrator.journal import Journal
from entities.orchestrator.mesh_view import MeshView
from schemas.cluster import Analyse, AnalysisFailed, SampleWritten, WriteSample
from schemas.errors import BadModel, DmscError, Unavailable
from schemas.job import WeightsManifest
from schemas.task_graph import ModelTopology

log = get_logger("orchestrator")

ASK_AGAIN_S = 30.0
"""An agent that was restarted meanwhile knows of no analysis. One that is at it takes the order for a
repetition; it ends a worker that does not get on, and gives one that does all the time that it takes."""
ANALYSTS = 3
"""Node agents asked to analyse, one after the other, before the job fails."""
SAMPLE_DEADLINE_S = 90.0


class ModelWork:
    """Orders it from agents of the job's clusters; what they find comes back in messages of its own."""

    def __init__(self, bus: Bus, mesh: MeshView, journal: Journal) -> None:
        self._bus = bus
        self._mesh = mesh
        self._journal = journal
        self._job = journal.record.job
        self._spec = journal.record.spec
        self._topology: asyncio.Future[ModelTopology] = asyncio.get_running_loop().create_future()
        self._sample: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    # --- what agents answer -------------------------------------------------------------------------------
    def topology(self, message: ModelTopology) -> None:
        if not self._topology.done():
            self._topology.set_result(message)

    def analysis_failed(self, message: AnalysisFailed) -> None:
        if not self._topology.done():
            self._topology.set_exception(BadModel(message.text))

    def sample_written(self, message: SampleWritten) -> None:
        if not self._sample.done():
            self._sample.set_result(message.text)

    # --- what they are asked ------------------------------------------------------------------------------
    async def analyse(self) -> ModelTopology:
        """
        Raises:
            BadModel: it has none.
            Unavailable: nobody answered who was asked.
        """
        secrets = await secrets_for(self._bus, self._spec)
        order = Analyse(job=self._job, spec=self._spec, secrets=secrets)
        asked: list[str] = []
        while len(asked) < ANALYSTS:
            if not self._agents():
                await self._journal.reason("no node has joined: waiting")
                await self._mesh.next_change()
                continue
            agent = next((sid for sid in self._agents() if sid not in asked), None)
            if agent is None:
                break
            asked.append(agent)
            with contextlib.suppress(Unavailable):
                return await self._mesh.while_there(agent, self._analysed_by(agent, order))
            log.warning("no topology, asking another node", job=self._job, agent=agent)
            if agent not in self._mesh.nodes:
                asked.remove(agent)  # it died: no word on the model
        raise Unavailable(f"no topology from {', '.join(asked)}")

    async def write_sample(self, manifest: WeightsManifest) -> str:
        """A courtesy at the end: its failure is told, and fails nothing."""
        agents = self._agents()
        if not agents:
            return ""
        try:
            order = WriteSample(
                job=self._job, spec=self._spec, weights_url=manifest.url,
                secrets=await secrets_for(self._bus, self._spec),
            )  # fmt: skip
            key = self._mesh.nodes[agents[0]].sealing_key
            await self._bus.command(WRITE_SAMPLE, order, deadline_s=10.0, agent=agents[0], seal_to=key)
            async with asyncio.timeout(SAMPLE_DEADLINE_S):
                return await self._sample
        except (DmscError, TimeoutError) as error:
            log.warning("no sample", job=self._job, reason=str(error) or "timed out")
            return ""

    async def _analysed_by(self, agent: str, order: Analyse) -> ModelTopology:
        while not self._topology.done():
            key = self._mesh.nodes[agent].sealing_key
            await self._bus.command(ANALYSE, order, deadline_s=20.0, agent=agent, seal_to=key)
            await asyncio.wait([self._topology], timeout=ASK_AGAIN_S)
        return self._topology.result()

    def _agents(self) -> list[str]:
        wanted = self._spec.parallel.clusters
        return sorted(
            (sid for sid, node in self._mesh.nodes.items() if not wanted or node.cluster in wanted),
            key=lambda sid: (self._mesh.cordons.whole(sid), not self._mesh.nodes[sid].warm, sid),
        )
