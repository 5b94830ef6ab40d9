"""Trials of plans for the queue's core, for jobs that counts of slots say too little of (ADR-0107).

A decision runs on a thread, and its trials with it. They are bounded in number and time: what was not tried
is tried in the next decision, and what was tried is remembered as long as nothing that it depends on changes.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from bus.logs import get_logger
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.eligible_slots import Records
from entities.orchestrator.planning.placement import Cordoned, NoRoom
from entities.orchestrator.queue.granted_plan import GrantFacts, TriedPlan, try_plan
from entities.orchestrator.queue.mesh_slots import emptied, shaped_within, slot_name, slots_of
from entities.planner.plan_request import PlanRequest
from entities.queue.plan_trials import SlotTrial, TrialLater
from schemas.cluster import NodeStatus
from schemas.job import JobSpec
from schemas.task_graph import Placement

log = get_logger("orchestrator")

MOST_REMEMBERED = 256
"""Trials of a job; then all are forgotten."""
MOST_PARTS = 16
"""Parts of a trial's slots that are planned on."""
ELSEWHERE = "elsewhere"
"""Stands for an instance in a slot that a trial may not use."""


@dataclass
class TrialBudget:
    """How many trials a decision may make, and for about how many seconds; one in any case."""

    most: int = 32
    most_s: float = 0.5
    made: int = 0
    took_s: float = 0.0

    def spend(self) -> None:
        """Another trial begins.

        Raises:
            TrialLater: there were as many as there may be.
        """
        if self.made and (self.made >= self.most or self.took_s >= self.most_s):
            raise TrialLater
        self.made += 1


@dataclass(frozen=True)
class TriedMesh:
    """The mesh of one decision. `extent`: equal as long as trials would come to the same."""

    nodes: Sequence[NodeStatus]
    records: Records
    cordoned: Cordoned
    extent: object
    budget: TrialBudget = field(default_factory=TrialBudget)

    @cached_property
    def empty(self) -> list[NodeStatus]:
        """The nodes without instances."""
        return emptied(self.nodes)

    @cached_property
    def clusters(self) -> dict[str, str]:
        """By agent SID."""
        return {node.sid: node.cluster for node in self.nodes}

    @cached_property
    def _places(self) -> dict[str, list[tuple[str, Placement]]]:
        return {
            node.sid: [
                (
                    slot_name(node.sid, slot.index),
                    Placement(
                        sid=ELSEWHERE, cluster=node.cluster, node=node.node, slot=slot.index, device=""
                    ),
                )
                for slot in node.slots
            ]
            for node in self.nodes
        }

    def all_but(self, slots: Collection[str]) -> dict[str, list[Placement]]:
        """The other slots as if they were occupied, by agent SID."""
        return {
            agent: [place for slot, place in places if slot not in slots]
            for agent, places in self._places.items()
        }


class TriedPlans:
    """What is known of one job's plans, by their number of replicas and slots.

    `begin_search`: called on the loop that made it, with a request that was not found a plan for at once.
    """

    def __init__(self, begin_search: Callable[[PlanRequest], None]) -> None:
        self._begin_search = begin_search
        self._known: dict[tuple[int, frozenset[str]], TriedPlan] = {}
        self._holds_for: tuple[object, ...] = ()

    def trial(self, facts: GrantFacts, mesh: TriedMesh, *, may_search: bool) -> JobTrial:
        """A trial for one decision; what is remembered of a job or mesh that has changed is forgotten.

        Args:
            facts: of the job; nodes and what is occupied are the mesh's.
            mesh: of the decision.
            may_search: whether it may have a search begun.
        """
        searches = len(facts.found), len(facts.refused), facts.searching
        holds_for = facts.spec, facts.topology, facts.bits_class, searches, mesh.extent
        if holds_for != self._holds_for or len(self._known) >= MOST_REMEMBERED:
            self._known, self._holds_for = {}, holds_for
        loop = asyncio.get_running_loop()

        def begin(request: PlanRequest) -> None:
            loop.call_soon_threadsafe(self._begin_search, request)

        return JobTrial(facts, mesh, self._known, begin if may_search else None)


class JobTrial:
    """Tries plans of one job during one decision; see `entities.queue.plan_trials.SlotTrial`.

    `begin_search`: has a search begun; None: there is to be none now.
    """

    def __init__(
        self,
        facts: GrantFacts,
        mesh: TriedMesh,
        known: dict[tuple[int, frozenset[str]], TriedPlan],
        begin_search: Callable[[PlanRequest], object] | None,
    ) -> None:
        self._facts, self._mesh, self._known = facts, mesh, known
        self._begin_search = begin_search
        self.searching = facts.searching
        self.why = ""

    def __call__(self, replicas: int, slots: Sequence[str], *, search: bool = False) -> Sequence[str] | None:
        """The slots of a plan, if there is one at once, or a search has found one."""
        among = frozenset(slots)
        tried = self._known.get((replicas, among))
        if tried is None:
            self._mesh.budget.spend()
            began = time.monotonic()
            try:
                tried = self._try(replicas, slots)
            except Exception as error:  # one job's trouble does not end the decision about all
                log.exception("trial of a plan failed", job=self._facts.job)
                tried = TriedPlan(NoRoom(f"the trial of its plan failed: {type(error).__name__}: {error}"))
            self._known[replicas, among] = tried
            self._mesh.budget.took_s += time.monotonic() - began
        if isinstance(tried.slots, NoRoom):
            if search and tried.search is not None and self._begin_search is not None and not self.searching:
                self.searching = True
                self._begin_search(tried.search)
            why = tried.slots.reason
            self.why = f"one is searched, since at once: {why}" if self.searching else why
            return None
        return tried.slots

    def _try(self, replicas: int, slots: Sequence[str]) -> TriedPlan:
        """On all of these slots; if that keeps the constraints not as it comes, on parts that may."""
        whole = self._plan(replicas, slots)
        if isinstance(whole.slots, NoRoom):
            for part in islice(parts(self._facts.spec, replicas, slots, self._mesh.clusters), MOST_PARTS):
                tried = self._plan(replicas, part)
                if not isinstance(tried.slots, NoRoom):
                    return tried
        return whole

    def _plan(self, replicas: int, slots: Sequence[str]) -> TriedPlan:
        return try_plan(self._facts, replicas, self._mesh.empty, self._mesh.all_but(frozenset(slots)))


def parts(
    spec: JobSpec, replicas: int, slots: Sequence[str], clusters: Mapping[str, str]
) -> Iterator[list[str]]:
    """Parts of these slots on which hard constraints are kept by any plan: one node, or one slot of each.

    Args:
        spec: the job.
        replicas: of each stage, if the job gives a range.
        slots: their ids.
        clusters: by the SID of a node's agent.
    """
    rules = {(rule.kind, rule.of) for rule in spec.plan.constraints if rule.hard}
    least = slots_of(shaped_within(spec, replicas).parallel)
    for scope in ("node", "cluster"):
        groups: dict[str, list[str]] = defaultdict(list)
        for slot in slots:
            agent = slot.rpartition("/")[0]
            groups[agent if scope == "node" else clusters.get(agent, "")].append(slot)
        if ("together", scope) in rules:
            yield from (group for group in groups.values() if len(group) >= least)
        if not rules.isdisjoint({("spread", scope), ("apart", scope)}):
            yield [group[0] for group in groups.values()]


AsksTrial = Callable[[TriedMesh], SlotTrial]


def trials_on(mesh: MeshView, asked: Mapping[str, AsksTrial]) -> dict[str, SlotTrial]:
    """Who tries the plans of jobs for which a count says too little, on the mesh as it is now. By job."""
    if not asked:
        return {}
    now = TriedMesh(mesh.open_nodes(), dict(mesh.records), mesh.cordons.places(), mesh.extent())
    return {job: trial(now) for job, trial in asked.items()}
