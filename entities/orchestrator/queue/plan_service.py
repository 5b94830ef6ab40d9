"""Answers questions about plans: few at once, each within a deadline, and none on the leader's loop
(ADR-0079)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import ANALYSE, FORGET_TOPOLOGY
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.eligible_slots import eligible, query_of
from entities.orchestrator.planning.plan_question import asked, told
from entities.orchestrator.planning.plan_requests import on_network
from entities.orchestrator.planning.plan_rules import open_to
from entities.orchestrator.queue.mesh_slots import emptied
from entities.planner.plan_request import NoPlan, PlanRequest
from entities.planner.planning_process import PlanningConfig, beside_the_loop, searched_with_less
from schemas.cluster import Analyse, AnalysisFailed, ForgetTopology, NodeStatus
from schemas.envelope import Envelope
from schemas.errors import (
    BadJob,
    BadModel,
    Conflict,
    DmscError,
    ErrorReply,
    NotFound,
    Overloaded,
    Unavailable,
)
from schemas.job import JobSpec
from schemas.plans import MakePlan, PlanBody, PlanMade
from schemas.task_graph import ModelTopology, Placement

log = get_logger("orchestrator")


def work_ms(request: PlanRequest) -> float:
    """A step of a request if all of its slots shared the work perfectly."""
    speed = sum(slot.speed for slot in request.slots) or 1.0
    return request.microbatches * sum(layer.work_ms for layer in request.layers) / speed


@dataclass(frozen=True, kw_only=True)
class PlanServiceConfig:
    """`searches`: at once; each takes a core of the orchestrator's machine for as long as it lasts.

    A gateway waits longer (`OperationTimes.plan_s`) than a turn, an analysis and two searches take.
    """

    searches: int = 2
    most_waiting: int = 8
    wait_s: float = 20.0
    """For a turn; then the question is refused, with a time to come back."""
    search_s: float = 10.0
    analysis_s: float = 60.0
    """A node's analysis of a model that nobody has measured; it builds the model."""
    measured_s: float = 15.0
    """For nodes that have just joined and are still measured, where there is no plan without them."""


class PlanService:
    """Takes questions of gateways.

    `known`: the analysed model of a running job, None without one. `occupied`: slots that are promised to
    jobs, by node agent.
    """

    def __init__(
        self,
        bus: Bus,
        mesh: MeshView,
        known: Callable[[str], ModelTopology | None],
        occupied: Callable[[], Mapping[str, Sequence[Placement]]],
        config: PlanServiceConfig = PlanServiceConfig(),
        planning: PlanningConfig = PlanningConfig(),
    ) -> None:
        self._bus, self._mesh, self._known, self._occupied = bus, mesh, known, occupied
        self._config, self._planning = config, replace(planning, deadline_s=config.search_s)
        self._turns = asyncio.Semaphore(config.searches)
        self._users: set[str] = set()
        self._analyses: dict[str, tuple[str, asyncio.Future[ModelTopology]]] = {}

    async def make(self, message: MakePlan, envelope: Envelope) -> PlanMade:
        """The plan for a question.

        Raises:
            Overloaded: its user waits for another plan, too many do, or its turn does not come.
            BadJob: what is asked for can't be: what, where, and a remedy.
            NotFound: there is no such job, or its model is not known.
            Conflict: no node is there that could analyse the model.
            Unavailable: a node took too long for that.
        """
        async with self._turn(message.user):
            topology = await self._topology(message)
            spec, topology, request, nodes = await self._asked(message.question, topology)
            try:
                on_links = await beside_the_loop(on_network, request, self._mesh.network(), work_ms(request))
                answer = await searched_with_less(on_links, self._planning)
            except NoPlan as refused:
                raise BadJob(str(refused)) from refused
            return await beside_the_loop(told, spec, topology, request, answer, nodes)

    async def _asked(
        self, question: PlanBody, topology: ModelTopology
    ) -> tuple[JobSpec, ModelTopology, PlanRequest, list[NodeStatus]]:
        """What the planner is asked, and on which nodes. While some are still measured, which offer no slots
        yet, it waits for these if there is no plan without them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.measured_s
        while True:
            seen = self._mesh.changes
            nodes, taken = self._mesh.open_nodes(), self._occupied()
            if not question.free:
                nodes, taken = emptied(nodes), {}
            records, cordons = dict(self._mesh.records), self._mesh.cordons.places()
            try:
                return *await beside_the_loop(
                    asked, question, topology, nodes, records, taken, cordons
                ), nodes
            except NoPlan as refused:
                measured = sorted(node.sid for node in nodes if not node.warm)
                if not measured or loop.time() >= until:
                    rest = (
                        f"; still measured: {', '.join(measured)}: ask again in a moment" if measured else ""
                    )
                    raise BadJob(f"{refused}{rest}") from refused
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._mesh.until_changed(seen)

    @contextlib.asynccontextmanager
    async def _turn(self, user: str) -> AsyncIterator[None]:
        if user in self._users:
            raise Overloaded(
                f"{user} waits for a plan already: ask again when it has come",
                retry_after_s=self._config.search_s / 2,
            )
        if len(self._users) >= self._config.searches + self._config.most_waiting:
            raise Overloaded(
                f"{len(self._users)} plans are asked for at once: ask again in a moment",
                retry_after_s=self._config.search_s,
            )
        self._users.add(user)
        try:
            try:
                async with asyncio.timeout(self._config.wait_s):
                    await self._turns.acquire()
            except TimeoutError:
                raise Overloaded(
                    f"{self._config.searches} plans are being made for others, and none ended within "
                    f"{self._config.wait_s:g} s: ask again in a moment",
                    retry_after_s=self._config.search_s,
                ) from None
            try:
                yield
            finally:
                self._turns.release()
        finally:
            self._users.discard(user)

    # --- the model ----------------------------------------------------------------------------------------
    async def _topology(self, message: MakePlan) -> ModelTopology:
        question = message.question
        if question.model is not None:
            return await beside_the_loop(question.model.topology)
        if question.like is not None:
            if (topology := self._known(question.like)) is None:
                raise NotFound(
                    f"like: no running job {question.like} whose model was analysed here: give model, or a "
                    "job of `dmsc jobs`"
                )
            return topology
        return await self._analyse(message)

    async def _analyse(self, message: MakePlan) -> ModelTopology:
        name = f"p{secrets.token_hex(3)}"
        spec = message.question.job
        clusters = spec.parallel.clusters
        nodes = open_to(spec, eligible(self._mesh.open_nodes(), query_of(spec), self._mesh.records))
        usable = sorted(
            (node for node in nodes if not clusters or node.cluster in clusters),
            key=lambda node: (self._mesh.cordons.whole(node.sid), not node.warm, node.sid),
        )
        if not usable:
            raise Conflict("no node is there that the job may use: join one, or give model")
        agent = usable[0].sid
        found: asyncio.Future[ModelTopology] = asyncio.get_running_loop().create_future()
        self._analyses[name] = agent, found
        try:
            async with asyncio.timeout(self._config.analysis_s):
                order = Analyse(job=name, spec=spec, user=message.user)
                await self._bus.command(ANALYSE, order, agent=agent, seal_to=usable[0].sealing_key)
                return await found
        except TimeoutError:
            raise Unavailable(
                f"{agent} has not measured the model within {self._config.analysis_s:g} s: measure it here, "
                "with dmsc plan FILE --mesh"
            ) from None
        finally:
            del self._analyses[name]
            with contextlib.suppress(DmscError):
                await self._bus.command(
                    FORGET_TOPOLOGY, ForgetTopology(job=name), deadline_s=5.0, agent=agent
                )

    def topology(self, message: ModelTopology, agent: str) -> None:
        """An analysis that a plan waits for, of the agent that was asked."""
        asked_for = self._analyses.get(message.job)
        if asked_for is not None and asked_for[0] == agent and not asked_for[1].done():
            asked_for[1].set_result(message)

    def analysis_failed(self, message: AnalysisFailed, agent: str) -> None:
        asked_for = self._analyses.get(message.job)
        if asked_for is not None and asked_for[0] == agent and not asked_for[1].done():
            lacked = ErrorReply(code=message.code, text=message.text).to_exception()
            asked_for[1].set_exception(lacked if isinstance(lacked, Unavailable) else BadModel(message.text))
