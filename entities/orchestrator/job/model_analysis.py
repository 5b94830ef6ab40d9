"""Work of node agents on a job's model: topology before placement (draft §5.3), a text sample at the end."""

from __future__ import annotations

import asyncio

from bus.logs import get_logger
from bus.subjects import ANALYSE, WRITE_SAMPLE
from entities.orchestrator.job.shared_analyses import SharedAnalyses, analysis_key
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.job_secrets import secrets_for
from entities.orchestrator.planning.eligible_slots import refusal
from schemas.cluster import Analyse, AnalysisFailed, SampleWritten, WriteSample
from schemas.errors import BadJob, BadModel, Conflict, DmscError, ErrorReply, Unavailable
from schemas.job import JobState, WeightsManifest
from schemas.limits import SLOWEST_BYTES_PER_S
from schemas.memory_estimate import largest_room
from schemas.plain_text import shown
from schemas.task_graph import ModelTopology

log = get_logger("orchestrator")


class ModelAnalysis:
    """Orders model work from agents of the job's clusters; results come back as messages of their own."""

    def __init__(self, job: JobContext, shared: SharedAnalyses) -> None:
        self._job = job
        self._shared = shared
        self._times = job.times.run
        self._topology: asyncio.Future[ModelTopology] = asyncio.get_running_loop().create_future()
        self._sample: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._again: asyncio.Task[ModelTopology | DmscError] | None = None
        self._analysts: set[str] = set()
        self._writers: set[str] = set()

    @property
    def known(self) -> ModelTopology | None:
        """What the last analysis found; None: there was none in this term, or it failed."""
        done = self._topology.done() and not self._topology.cancelled()
        return self._topology.result() if done and self._topology.exception() is None else None

    # --- answers: only of agents that were asked ------------------------------------------------------------
    def topology(self, message: ModelTopology, agent: str) -> None:
        if not self._is_asked(agent, self._analysts, "topology") or self._topology.done():
            return
        if message.auto and not self._job.spec.training.auto:
            return  # once more what it was fitted by
        self._topology.set_result(message)

    def analysis_failed(self, message: AnalysisFailed, agent: str) -> None:
        """The analysis failed: the model is bad, or the worker lacked something, the bus for instance."""
        if not self._is_asked(agent, self._analysts, "analysis") or self._topology.done():
            return
        lacked = ErrorReply(code=message.code, text=message.text).to_exception()
        self._topology.set_exception(lacked if isinstance(lacked, Unavailable) else BadModel(message.text))

    def sample_written(self, message: SampleWritten, agent: str) -> None:
        if self._is_asked(agent, self._writers, "sample") and not self._sample.done():
            self._sample.set_result(message.text)

    def _is_asked(self, agent: str, agents: set[str], what: str) -> bool:
        if agent not in agents:
            log.warning(f"{what} of a node that was not asked: ignored", job=self._job.name, agent=agent)
        return agent in agents

    # --- orders -------------------------------------------------------------------------------------------
    async def analyse(self) -> ModelTopology:
        """Has an agent analyse the model; tries the next agent where one does not answer.

        A job that is another by now (`training.auto` was fixed) is analysed anew. Members of an array with
        the same model share one analysis, and a version of a service that starts again has its former one.

        Raises:
            BadModel: the model can't be analysed.
            BadJob: no slot of the mesh is what the job requires.
            Unavailable: no node could do it, or the job's secrets can't be read; try again.
        """
        name, place = self._job.name, self._job.store.record.array
        if place is None and self._job.spec.serve is None:
            return await self._analyse()
        key = analysis_key(name if place is None else place.array, self._job.spec)
        found = await self._shared.of(key, self._analyse)
        if found.job != name:
            found = found.model_copy(update={"job": name})
        if self.known is not found:
            self._topology = asyncio.get_running_loop().create_future()
            self._topology.set_result(found)
        return found

    async def present(self) -> ModelTopology | None:
        """What is known; of a job that was taken over it is measured first. None: it does not train."""
        if self.known is None and self._job.store.record.state is JobState.RUNNING:
            return await self.while_running()
        return self.known

    async def while_running(self) -> ModelTopology:
        """The topology of a job that trains, which an earlier orchestrator had measured.

        Raises:
            Conflict: it takes longer than whoever asks waits; it is there before long.
            DmscError: see `analyse`.
        """
        if self._again is None or self._again.done():
            self._again = self._job.tasks.spawn(self._found())
        done, _ = await asyncio.wait({self._again}, timeout=self._times.analysis_asked_s)
        if not done:
            raise Conflict(f"the model of job {self._job.name} is being measured: ask again in a moment")
        found = self._again.result()
        if isinstance(found, DmscError):
            raise found
        return found

    async def _found(self) -> ModelTopology | DmscError:
        try:
            return await self.analyse()
        except DmscError as error:  # no matter of the job, which trains
            return error

    async def _analyse(self) -> ModelTopology:
        secrets = await secrets_for(self._job.bus, self._job.spec)
        user = self._job.store.record.user
        order = Analyse(job=self._job.name, spec=self._job.spec, secrets=secrets, user=user)
        self._topology = asyncio.get_running_loop().create_future()
        passed_over: dict[str, str] = {}  # agents that could not do it, and why; it says nothing of the model
        while True:
            agents = self._agents()
            why = refusal([*self._job.mesh.nodes.values()], self._job.spec, self._job.mesh.records)
            if why and self._job.store.record.loss_first is None:
                raise BadJob(why)
            if why or not agents:
                await self._job.store.reason(why or "no node has joined: waiting")
                await self._job.mesh.next_change()
                continue
            agent = next((sid for sid in agents if sid not in passed_over), None)
            if agent is None:
                raise Unavailable("; ".join(f"{sid}: {passed_over[sid]}" for sid in agents))
            try:
                return await self._job.mesh.while_there(agent, self._analysed_by(agent, order))
            except Unavailable as error:
                log.warning(
                    "no topology, asking another node", job=self._job.name, agent=agent, reason=error.text
                )
                passed_over[agent] = error.text

    async def write_sample(self, manifest: WeightsManifest) -> str:
        """Has an agent generate a text sample; returns '' on failure, which is only logged."""
        agents = self._agents()
        if not agents:
            return ""
        room = largest_room([self._job.mesh.nodes[agents[0]]])
        if room and manifest.bytes > room:  # it is written by one process, which holds the whole model
            text = f"the weights have {shown(manifest.bytes)}, and {agents[0]} has {shown(room)}"
            log.warning("no sample", job=self._job.name, reason=text)
            return ""
        try:
            order = WriteSample(
                job=self._job.name,
                spec=self._job.spec,
                weights_url=manifest.url,
                secrets=await secrets_for(self._job.bus, self._job.spec),
            )
            key = self._job.mesh.nodes[agents[0]].sealing_key
            self._writers.add(agents[0])
            await self._job.bus.command(
                WRITE_SAMPLE,
                order,
                deadline_s=self._times.answer_s,
                while_heard=True,
                agent=agents[0],
                seal_to=key,
            )
            reading_s = manifest.bytes / SLOWEST_BYTES_PER_S
            async with self._job.bus.pulse.timeout(self._times.sample_s + reading_s):
                return await self._sample
        except (DmscError, TimeoutError) as error:
            log.warning("no sample", job=self._job.name, reason=str(error) or "timed out")
            return ""

    async def _analysed_by(self, agent: str, order: Analyse) -> ModelTopology:
        self._analysts.add(agent)
        while not self._topology.done():
            key = self._job.mesh.nodes[agent].sealing_key
            await self._job.bus.command(
                ANALYSE,
                order,
                deadline_s=self._times.analysis_accept_s,
                while_heard=True,
                agent=agent,
                seal_to=key,
            )
            await asyncio.wait([self._topology], timeout=self._times.analysis_repeat_s)
        try:
            return self._topology.result()
        except Unavailable:
            self._topology = asyncio.get_running_loop().create_future()
            raise

    def _agents(self) -> list[str]:
        clusters = self._job.spec.parallel.clusters
        return sorted(
            (node.sid for node in self._job.eligible_nodes() if not clusters or node.cluster in clusters),
            key=lambda sid: (self._job.mesh.cordons.whole(sid), not self._job.mesh.nodes[sid].warm, sid),
        )
