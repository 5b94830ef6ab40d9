"""The plan that a waiting job is placed with, made at once on the slots that the queue gives it; and whether
there would be one on others. Pure.

It takes from milliseconds to a quarter of a second (64 rules, a thousand layers, thousands of slots), so it
is made on a thread, of facts that do not change meanwhile; whoever takes the slots looks whether they are
still free (ADR-0073).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from entities.orchestrator.planning.eligible_slots import Records, plan_in_one_class
from entities.orchestrator.planning.placement import Cordoned, NoRoom
from entities.orchestrator.planning.plan_requests import request_for
from entities.orchestrator.planning.task_graph import graph_for, plan_in, room_for
from entities.orchestrator.queue.mesh_slots import emptied, shaped_within, slot_name
from entities.planner.plan_request import NoPlan, PlanAnswer, PlanRequest, PlanSlot
from schemas.cluster import NodeStatus
from schemas.errors import BadJob
from schemas.job import JobSpec
from schemas.task_graph import ModelTopology, Placement, TaskGraph


@dataclass(frozen=True, kw_only=True)
class GrantFacts:
    """What a plan depends on.

    Attributes:
        job: its id.
        spec: the job.
        topology: its analysed model.
        replicas: that the queue gives it slots for.
        only: the nodes that the queue leaves it; None: all.
        slots: those of the plan for which the queue admitted it; None: it was not planned there.
        nodes: the agents that registered, with their slots.
        occupied: placements promised to other jobs, by agent SID.
        cordoned: places that get no new instances.
        bits_class: the one that the job has; empty: none yet.
        records: of the registry, by SID.
        found: what searches have found.
        refused: what searches have not found a plan for, and why.
        searching: a search is going on.
    """

    job: str
    spec: JobSpec
    topology: ModelTopology
    replicas: int
    only: frozenset[str] | None
    slots: frozenset[str] | None
    nodes: Sequence[NodeStatus]
    occupied: Mapping[str, Sequence[Placement]]
    cordoned: Cordoned
    bits_class: str
    records: Records
    found: Mapping[PlanRequest, PlanAnswer]
    refused: Mapping[PlanRequest, NoRoom | None]
    searching: bool


@dataclass(frozen=True, kw_only=True)
class GrantedPlan:
    """The outcome.

    Attributes:
        graph: the plan, or why there is none.
        spec: the job with the replicas that were planned last.
        search: a request for which a search is to begin, and the queue to ask again when it has ended.
        unfit: why the whole mesh has no room for it, were it empty; empty: that is not so.
    """

    graph: TaskGraph | NoRoom
    spec: JobSpec
    search: PlanRequest | None
    unfit: str = ""


def plan_granted(facts: GrantFacts) -> GrantedPlan:
    """Plans the job; if there is no room, says whether there ever may be.

    It may get fewer replicas than it was given slots for, where no plan has room for so many. Slots of
    unequal memory, or constraints, may need a plan that only a search finds.

    Raises:
        BadJob: it can't be planned at all.
    """
    attempt = _Attempt(facts)
    within = facts.spec.parallel.replica_range
    least = 1 if within is None else within.least
    graph: TaskGraph | NoRoom = NoRoom("")
    for replicas in dict.fromkeys((max(least, facts.replicas), least)):
        attempt.spec = shaped_within(facts.spec, replicas)
        nodes = _within(facts.nodes, facts.only)
        if facts.slots is not None:  # the plan that it was admitted for
            graph = attempt.at_once(_with_slots(nodes, facts.slots), facts.occupied)
        if not isinstance(graph, TaskGraph):
            graph = attempt.planned(nodes, facts.occupied)
        if isinstance(graph, TaskGraph) or attempt.searching:
            break
    unfit = ""
    if isinstance(graph, NoRoom):
        alone = None if attempt.searching else attempt.planned(emptied(facts.nodes), {})
        if alone is None or isinstance(alone, TaskGraph) or attempt.searching:
            graph = NoRoom(graph.reason)
        elif alone.never:
            graph = alone
        else:
            unfit = f"the whole mesh has no room for it, others go first: {alone.reason}"
            graph = NoRoom(unfit)
    return GrantedPlan(graph=graph, spec=attempt.spec, search=attempt.search, unfit=unfit)


@dataclass(frozen=True)
class TriedPlan:
    """`slots`: which ones the plan uses, or why there is none. `search`: what a search may find one for."""

    slots: Sequence[str] | NoRoom
    search: PlanRequest | None = None


def try_plan(
    facts: GrantFacts,
    replicas: int,
    nodes: Sequence[NodeStatus],
    occupied: Mapping[str, Sequence[Placement]],
) -> TriedPlan:
    """Whether the job has a plan with so many replicas on what is free of these nodes.

    Args:
        facts: of the job; its nodes and what is occupied do not count.
        replicas: of each stage, if the job gives a range.
        nodes: the agents, with their slots.
        occupied: what others have of them, by agent SID.
    """
    attempt = _Attempt(facts)
    attempt.spec = shaped_within(facts.spec, replicas)
    try:
        graph = attempt.planned(nodes, occupied)
    except BadJob as refused:  # who is placed is told so
        return TriedPlan(NoRoom(refused.text))
    if isinstance(graph, NoRoom):
        return TriedPlan(attempt.lacks or graph, attempt.search)
    agents = {(node.cluster, node.node): node.sid for node in nodes}
    taking = [place for place in graph.placements if place.slot >= 0]
    return TriedPlan([slot_name(agents[place.cluster, place.node], place.slot) for place in taking])


class _Attempt:
    def __init__(self, facts: GrantFacts) -> None:
        self._facts = facts
        self.spec = facts.spec
        self.search: PlanRequest | None = None
        self.lacks: NoRoom | None = None
        """Why there is no plan at once for what is searched."""

    @property
    def searching(self) -> bool:
        return self._facts.searching or self.search is not None

    def at_once(
        self, nodes: Sequence[NodeStatus], occupied: Mapping[str, Sequence[Placement]]
    ) -> TaskGraph | NoRoom:
        """As `planned`, without a search."""
        before, self.search = self.search, None
        graph = self.planned(nodes, occupied)
        self.search = before
        return graph

    def planned(
        self, nodes: Sequence[NodeStatus], occupied: Mapping[str, Sequence[Placement]]
    ) -> TaskGraph | NoRoom:
        """The plan at once, or one that was searched, on slots of one class of bits."""
        facts, spec = self._facts, self.spec

        def on(open_nodes: Sequence[NodeStatus]) -> TaskGraph | NoRoom:
            room = room_for(spec, open_nodes, occupied, facts.cordoned)
            if isinstance(room, NoRoom):
                return room
            try:
                request = request_for(spec, facts.topology, room)
            except NoPlan as refused:
                return NoRoom(str(refused), never=refused.never)
            for found, answer in facts.found.items():  # by a search; its slots may be free yet
                if _alike(found, request) and _still_open(request, found, answer):
                    return graph_for(facts.job, spec, facts.topology, room, found, answer)
            graph = plan_in(facts.job, spec, facts.topology, room, request)
            unequal = len({slot.memory_bytes for slot in request.slots}) > 1
            if isinstance(graph, TaskGraph) or not (unequal or request.is_constrained):
                return graph
            if (known := _refused(request, facts.refused)) is not None:
                return facts.refused[known] or graph
            self.lacks = graph
            if not self.searching:
                self.search = request
            what = "places that keep the constraints" if request.is_constrained else "slots of unequal memory"
            return NoRoom(f"a plan for {what} is searched, since at once: {graph.reason}")

        return plan_in_one_class(nodes, facts.spec, facts.bits_class, facts.records, on)


def _refused(request: PlanRequest, refused: Mapping[PlanRequest, NoRoom | None]) -> PlanRequest | None:
    """The request without a plan that this one is no better than: that had the same slots, or more."""
    if request in refused:
        return request
    for other in refused:
        if _alike(other, request) and set(request.slots) <= set(other.slots):
            return other
    return None


def _still_open(request: PlanRequest, found: PlanRequest, answer: PlanAnswer) -> bool:
    """Whether all slots of an earlier request's plan are among those of this one, and serve as they did."""
    there = {_as_served(slot) for slot in request.slots}
    return all(_as_served(found.slots[place.slot]) in there for place in answer.places)


def _as_served(slot: PlanSlot) -> tuple[object, ...]:
    return slot.node, slot.index, slot.memory_bytes, slot.labels


def _alike(first: PlanRequest, second: PlanRequest) -> bool:
    """Whether two requests of a job ask for the same units."""
    return (first.stages, first.replicas, first.standbys) == (second.stages, second.replicas, second.standbys)


def _within(nodes: Sequence[NodeStatus], only: frozenset[str] | None) -> Sequence[NodeStatus]:
    return nodes if only is None else [node for node in nodes if node.sid in only]


def _with_slots(nodes: Sequence[NodeStatus], slots: frozenset[str]) -> list[NodeStatus]:
    return [
        node.model_copy(
            update={"slots": tuple(slot for slot in node.slots if slot_name(node.sid, slot.index) in slots)}
        )
        for node in nodes
    ]
