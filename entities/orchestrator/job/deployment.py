"""A job on its way to its instances: it waits in the queue, is planned, and its instances start (§4.4(1))."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from bus.logs import get_logger
from entities.orchestrator.checkpointing.named_checkpoint import class_of_named
from entities.orchestrator.job.bus_outages import BusOutages
from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.job_state.instances import NodeLost, NotReady, StartFailed
from entities.orchestrator.job_state.retry_limits import Parked
from entities.orchestrator.planning.eligible_slots import Records, class_of, eligible, query_of
from entities.orchestrator.planning.placement import Cordoned, NoRoom, OpenRoom, are_free, facts_digest
from entities.orchestrator.planning.plan_requests import (
    cluster_distances,
    on_network,
    request_for,
)
from entities.orchestrator.planning.task_graph import graph_for, room_for, why_inexact
from entities.orchestrator.queue.granted_plan import GrantFacts, plan_granted
from entities.orchestrator.queue.job_queue import QueueTurn, SlotGrant
from entities.orchestrator.queue.job_trials import JobTrial, TriedMesh, TriedPlans
from entities.orchestrator.queue.mesh_slots import is_placed_by_plan, job_request, ran_s, work_left_s
from entities.planner.plan_at_once import EXACT
from entities.planner.plan_request import (
    BY_SEARCH,
    BY_SIMULATION,
    NoPlan,
    PlanAnswer,
    PlanRequest,
    SearchFailed,
)
from entities.planner.planning_process import beside_the_loop, searched
from entities.queue.queued_job import QueuedJob
from schemas.cluster import NodeStatus
from schemas.errors import BadJob
from schemas.job import JobRecord, JobSpec, JobState
from schemas.task_graph import ModelTopology, TaskGraph

log = get_logger("orchestrator")

START_TRIES = 3
PLAN_TRIES = 3
"""Plans in a row whose slots are taken by others meanwhile, until the queue is asked to decide anew."""
READY_TRIES = 3
"""Deployments in a row whose instances did not become ready, until the job is parked."""


class Deployment:
    """`waits`: the job has no instances and waits for room."""

    def __init__(self, job: JobContext, outages: BusOutages, *, waits: bool) -> None:
        self.waits = waits
        self._job = job
        self._times = job.times.run
        self._outages = outages
        self.placed_at = time.time()
        """When it got its slots, or was taken over with them."""
        self._unfit: tuple[object, str] | None = None
        """Of which nodes it has been found that they have no room for it, were they empty; and why."""
        self._only: frozenset[str] | None = None  # nodes that the queue leaves it; None: all
        self._asked: tuple[JobRecord, JobSpec, str, QueuedJob] | None = None
        self._turn: QueueTurn | None = None  # its place in the queue, in which it takes slots
        self._shaped = job.spec  # with as many replicas as it got slots for
        self._tried: dict[PlanRequest, NoRoom | None] = {}
        self._found: dict[PlanRequest, PlanAnswer] = {}
        self._search: asyncio.Task[None] | None = None
        self._later: list[asyncio.TimerHandle] = []  # when searches may begin again
        self._plans = TriedPlans(self._search_in_turn)
        self._searched_at = -math.inf

    @property
    def waiting(self) -> QueuedJob | None:
        """What it asks for; None: it has instances, or is held back for another reason than room."""
        if not self.waits:
            return None
        record = self._job.store.record
        held, unfit = record.held or self._job.queue.used_up(record), False
        if not held and self._unfit is not None and self._unfit[0] == self._job.mesh.extent():
            held, unfit = self._unfit[1], True
        spec = self._job.spec
        asked = self._asked
        if asked is not None and asked[0] is record and asked[1] is spec and asked[2] == held:
            return asked[3]  # it is asked before each decision, for thousands of jobs
        request = job_request(record, spec, held, unfit=unfit)
        job = QueuedJob(
            request=request,
            since=record.submitted_at,
            work_s=work_left_s(record, spec, record.checkpoint_step or 0, request),
            attained_slot_s=record.usage.slot_s,
            ran_s=ran_s(record, time.time()),
            parked=self._has_trained,
        )
        self._asked = record, spec, held, job
        return job

    def forget_shape(self) -> None:
        """The job was given another shape: what was found out about the former one no longer counts."""
        self._unfit = None
        self._job.queue.again()

    @property
    def _has_trained(self) -> bool:
        record = self._job.store.record
        return record.state is JobState.PARKED or record.loss_first is not None

    async def deploy(self, topology: ModelTopology) -> None:
        """Plans, starts all instances, and plans again without a node that turns out to be dead.

        Raises:
            Parked: instances do not become ready, again and again.
        """
        await self._outages.outlast("reading what it resumes from", self._take_class)
        pause_s, unready = self._times.deploy_pause_s, 0
        while True:
            graph = await self._plan(topology)
            await self._job.gateway.choose(graph)
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
            pause_s = min(2 * pause_s, self._times.deploy_pause_most_s)

    async def _take_class(self) -> None:
        """Goes on in the class of bits of the checkpoint that the job resumes from, if it has none yet."""
        job, spec = self._job, self._job.spec
        if spec.resume_from is None or spec.requires.bits == "any" or job.store.record.bits_class:
            return
        mesh = job.mesh
        if found := await class_of_named(job.bus, spec, spec.resume_from, mesh.sealing_keys):
            await job.store.note(now=True, bits_class=found)

    async def _plan(self, topology: ModelTopology) -> TaskGraph:
        """Waits in the queue until the job has its slots; records the plan, if they still are as it has them.

        Slots that change again and again while a plan is searched are taken as they come in the end.
        """
        for left in reversed(range(PLAN_TRIES)):
            graph, began = await self._granted(topology)
            graph = await self._on_network(await self._improve(graph, topology))
            if not self._is_stale(graph) or not left:
                break
            self.waits, self._job.instances.deployed = True, None  # its slots are anybody's
            await self._job.store.reason("its slots changed while a better plan was searched: planned again")
        if (former := self._job.store.record.graph) is not None:
            seen = [former.revision, *(recut.plan for recut in self._job.store.record.recuts)]
            graph = graph.model_copy(update={"revision": max(seen) + 1})
            self._job.instances.graph = graph
        if self._job.store.record.state is JobState.QUEUED:
            await self._job.store.move(JobState.ANALYSING, "room was found")
        because = why_inexact(self._job.spec, graph)
        present = self._job.store.record.bits_class
        bits_class = present or class_of(self._job.mesh.nodes.values(), graph, self._job.spec)
        await self._job.store.move(
            JobState.DEPLOYING,
            graph.reason,
            graph=graph,
            bits_class=bits_class,
            plan_s=time.monotonic() - began,
            exact=not because,
            inexact_because=because,
        )
        return graph

    def _is_stale(self, graph: TaskGraph) -> bool:
        """Whether its slots can do something else than they could when it was planned."""
        return graph.facts_digest != facts_digest(graph.placements, self._job.mesh.open_nodes())

    def _may_take(self, graph: TaskGraph) -> bool:
        """Whether a plan's slots are free for the job, and can do what they could when it was made."""
        mesh, occupied = self._job.mesh, self._job.queue.occupied(self._job.name)
        free = are_free(graph, mesh.open_nodes(), occupied, mesh.cordons.places())
        return free and not self._is_stale(graph)

    async def _granted(self, topology: ModelTopology) -> tuple[TaskGraph, float]:
        """The plan at once when the queue has given the job its slots, and since when it was only planned."""
        began = time.monotonic()
        place = partial(self.place, topology)
        with self._searching(), self._job.queue.turn(self._job.name, place) as turn:
            self._turn = turn
            if is_placed_by_plan(self._job.spec):
                turn.trial = partial(self.trial, topology)
            while isinstance(graph := await self._told(turn), NoRoom):
                if graph.never and not self._has_trained:  # what has trained waits for the nodes that it had
                    raise BadJob(graph.reason)
                waits_as = JobState.PARKED if self._has_trained else JobState.QUEUED
                async with self._job.queue.writing:
                    if self._job.store.record.state is not waits_as:
                        await self._job.store.move(waits_as, graph.reason)
                    else:
                        await self._job.store.reason(graph.reason)
                began = time.monotonic()
        return graph, began

    async def _told(self, turn: QueueTurn) -> TaskGraph | NoRoom:
        """What the queue says.

        Raises:
            BadJob: the job can't be planned at all.
            Parked: it can't, but has trained: it waits to be given another shape.
        """
        try:
            return await turn.news()
        except BadJob as refused:
            if not self._has_trained:
                raise
            raise Parked(refused.text, for_room=False) from None

    @contextlib.contextmanager
    def _searching(self) -> Iterator[None]:
        """Whatever is searched or planned meanwhile ends with it."""
        try:
            yield
        finally:
            self._turn = None
            if self._search is not None:
                self._search.cancel()
                self._search = None
            while self._later:
                self._later.pop().cancel()
            self._searched_at = -math.inf
            self._tried.clear()
            self._found.clear()

    async def place(self, topology: ModelTopology, grant: SlotGrant) -> TaskGraph | NoRoom:
        """Places the job now; if there is no room, says whether there ever may be.

        It is planned on a thread. Its slots are taken if they are still free then, else it is planned anew.
        """
        job, turn = self._job, self._turn
        self._only = grant.nodes
        for _ in range(PLAN_TRIES):
            extent = job.mesh.extent()
            facts = replace(
                self._facts(topology, grant, dict(job.mesh.records), job.mesh.cordons.places()),
                nodes=job.mesh.open_nodes(),
                occupied=job.queue.occupied(job.name),
            )
            planned = await beside_the_loop(plan_granted, facts)
            if self._turn is not turn:
                return NoRoom("it has left the queue")
            if held := job.store.record.held:  # it was to wait while it was planned
                return NoRoom(held)
            if job.spec is not facts.spec or job.store.record.bits_class != facts.bits_class:
                continue
            self._shaped = planned.spec
            if isinstance(planned.graph, NoRoom):
                if planned.search is not None:
                    self._begin_search(planned.search)
                if planned.unfit:
                    self._unfit = extent, planned.unfit
                elif turn is not None:  # the count was right: from now on its plan is tried before
                    turn.trial = partial(self.trial, topology)
                return planned.graph
            if self._may_take(planned.graph):
                job.instances.graph = planned.graph
                self.waits, self.placed_at = False, time.time()
                return planned.graph
        job.queue.again()
        return NoRoom(
            "the slots that it was to get were taken, or changed, while it was planned: it is planned again"
        )

    def _facts(
        self, topology: ModelTopology, grant: SlotGrant, records: Records, cordoned: Cordoned
    ) -> GrantFacts:
        """What its plan depends on, without nodes."""
        job = self._job
        return GrantFacts(
            job=job.name,
            spec=job.spec,
            topology=topology,
            replicas=grant.replicas,
            only=grant.nodes,
            slots=grant.slots,
            nodes=(),
            occupied={},
            cordoned=cordoned,
            bits_class=job.store.record.bits_class,
            records=records,
            found=dict(self._found),
            refused=dict(self._tried),
            searching=self._search is not None,
        )

    def trial(self, topology: ModelTopology, mesh: TriedMesh) -> JobTrial:
        """Tries the job's plan during one decision of the queue."""
        facts = self._facts(topology, SlotGrant(replicas=1), mesh.records, mesh.cordoned)
        rested = time.monotonic() - self._searched_at >= self._times.search_again_s
        may_search = rested and self._search is None and self._turn is not None
        return self._plans.trial(facts, mesh, may_search=may_search)

    def _search_in_turn(self, request: PlanRequest) -> None:
        """A trial of the queue found no plan at once; meanwhile the job may have been placed."""
        if self._turn is not None:
            self._begin_search(request)

    def _begin_search(self, request: PlanRequest) -> None:
        if self._search is None:
            self._search = asyncio.create_task(self._search_for(request))

    async def _search_for(self, request: PlanRequest) -> None:
        refusal: NoRoom | None = None
        for_good = True
        try:
            self._found[request] = await searched(request, self._job.planning)
        except SearchFailed as refused:
            refusal, for_good = NoRoom(str(refused)), False
        except NoPlan as refused:
            if request.is_constrained:  # else what the plan at once says is as true
                refusal = NoRoom(str(refused), never=refused.never)
        except Exception as error:  # its process could not be started, or its answer not be read
            log.exception("search for a plan failed", job=self._job.name)
            refusal = NoRoom(f"the search for a plan failed: {type(error).__name__}: {error}")
            for_good = False
        self._tried[request] = refusal
        self._search, self._searched_at = None, time.monotonic()
        again = partial(self._search_again, None if for_good else request)
        self._later.append(asyncio.get_running_loop().call_later(self._times.search_again_s, again))
        self._job.queue.again()

    def _search_again(self, failed: PlanRequest | None) -> None:
        """A trial may begin a search again: for what has failed, or on slots that came free meanwhile."""
        if failed is not None:
            self._tried.pop(failed, None)
        self._job.queue.again()

    async def _improve(self, graph: TaskGraph, topology: ModelTopology) -> TaskGraph:
        """A better plan by a search, where the one at once need not be the best; its slots must be free."""
        job = self._job
        if graph.forecast is None:
            return graph
        network = job.mesh.network()
        best_without = graph.forecast.planned_by in (EXACT, BY_SEARCH, BY_SIMULATION)
        if best_without and network.topology is None and not network.bytes_per_s:
            return graph
        room = self._room(graph)
        if isinstance(room, NoRoom):
            return graph
        shaped, step_ms = self._shaped, graph.forecast.step_ms
        try:
            request = await beside_the_loop(
                lambda: on_network(request_for(shaped, topology, room), network, step_ms)
            )
            if best_without and not request.hosts:
                return graph
            answer = await searched(request, self._job.planning)
        except NoPlan:
            return graph  # only with less memory than all that windows may hold
        better = await beside_the_loop(graph_for, job.name, shaped, topology, room, request, answer)
        if isinstance(better, NoRoom) or not self._may_take(better):
            return graph
        job.instances.graph = better
        return better

    async def _on_network(self, graph: TaskGraph) -> TaskGraph:
        """The graph with what the topology says of it: how far its clusters are, and which nodes it lacks."""
        job, network = self._job, self._job.mesh.network()
        if network.topology is None:
            return graph
        used = {(place.cluster, place.node) for place in graph.placements}
        nodes = [node for node in job.mesh.open_nodes() if (node.cluster, node.node) in used]
        distances = await beside_the_loop(cluster_distances, network.topology, nodes)
        changed: dict[str, object] = {"distances": distances}
        if missing := network.missing(nodes):
            changed["reason"] = f"{graph.reason}; {missing}"
        job.instances.graph = graph.model_copy(update=changed)
        return job.instances.graph

    def _room(self, graph: TaskGraph) -> OpenRoom | NoRoom:
        """What is free for the job in the class of bits of its plan, the slots that it holds among it."""
        job = self._job
        nodes = job.mesh.open_nodes()
        bits_class = job.store.record.bits_class or class_of(nodes, graph, job.spec)
        within = _within(eligible(nodes, query_of(job.spec, bits_class), job.mesh.records), self._only)
        return room_for(self._shaped, within, job.queue.occupied(job.name), job.mesh.cordons.places())

    async def _start(self, graph: TaskGraph) -> None:
        instances = self._job.instances
        for left in reversed(range(START_TRIES)):
            try:
                await self._outages.outlast("starting its instances", partial(self._start_missing, graph))
                return
            except StartFailed as failed:
                # a refusal is final; a death by signal may have been anything
                if "killed by" not in failed.text or not left:
                    raise
                del instances.members[failed.member.sid]

    async def _start_missing(self, graph: TaskGraph) -> None:
        instances = self._job.instances
        await instances.start([unit for unit in graph.units if unit.sid not in instances.members])

    async def _without_node(self, lost: NodeLost) -> None:
        """News about the mesh, not about the job: what was started ends, and the node gets nothing more."""
        log.warning("node lost while deploying", job=self._job.name, agent=lost.agent, reason=lost.text)
        if lost.agent is not None:
            self._job.mesh.forget_node(lost.agent)
        await self._plan_again(lost.text)

    async def _plan_again(self, why: str) -> None:
        self.waits = True
        await self._job.store.tell("fault", text=f"{why}; planned again")
        await self._job.instances.stop(now=True)
        self._job.instances.deployed = None


def _within(nodes: Sequence[NodeStatus], only: frozenset[str] | None) -> Sequence[NodeStatus]:
    return nodes if only is None else [node for node in nodes if node.sid in only]
