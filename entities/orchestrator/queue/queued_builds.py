"""Builds of data sets in the queue: they wait for lanes as jobs wait for slots (ADR-0088)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace

from bus.logs import get_logger
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.planning.eligible_slots import eligible
from entities.orchestrator.queue.lanes import RegisteredLanes, with_builds
from entities.orchestrator.queue.mesh_slots import SlotFacts
from entities.orchestrator.queue.slot_holder import LaneHolder
from entities.queue.decision import Admission, Cause, Hold, Resize
from entities.queue.queued_job import ActiveJob
from schemas.cluster import NodeStatus
from schemas.data_set.builds import BuildRecord, BuildState
from schemas.envelope import EntityKind
from schemas.job import JobSpec
from schemas.registry import InstanceState, Resolve

log = get_logger("orchestrator")

UNIT_AGENTS = Resolve(prefix="entity/cluster", kind=EntityKind.CLUSTER, state=InstanceState.ACTIVE)
"""What the registry is asked for: the node agents that work on units."""


ResolvesData = Callable[[JobSpec, str], Awaitable[JobSpec]]
"""Of a job and its user: the job with the versions of the data sets that it reads."""


def unit_nodes(mesh: MeshView) -> Iterator[NodeStatus]:
    """The nodes that take units: there, ready for processes, and not cordoned as a whole."""
    closed = mesh.cordons.places()
    for node in eligible(mesh.open_nodes(), UNIT_AGENTS, mesh.records):
        if node.warm and None not in closed.get(node.sid, ()):
            yield node


class QueuedBuilds:
    """The builds of one term, as the queue looks at them.

    `members`: those that have not ended, by id; `ended`: records of others. `changed`: called when another
    decision is needed.
    """

    def __init__(self, mesh: MeshView, changed: Callable[[], None]) -> None:
        self.members: dict[str, LaneHolder] = {}
        self.ended: Mapping[str, BuildRecord] = {}
        self.changed = changed
        self.late_versions: ResolvesData | None = None
        self._mesh = mesh
        self._lanes = RegisteredLanes()

    @property
    def resolve(self) -> ResolvesData:
        """Fixes the versions of a job's data sets, once its builds are done."""
        assert self.late_versions is not None, "set by the owner of builds"
        return self.late_versions

    def enter(self, build: LaneHolder) -> None:
        """A build enters the queue, until it `leave`s."""
        self.members[build.name] = build
        self.changed()

    def leave(self, name: str) -> None:
        self.members.pop(name, None)
        self.changed()

    @property
    def waiting(self) -> int:
        """How many wait for lanes."""
        return sum(build.waiting is not None for build in self.members.values())

    def records(self) -> dict[str, BuildRecord]:
        """The records of those that have not ended, by id."""
        return {name: build.record for name, build in self.members.items()}

    def done(self, name: str) -> bool | None:
        """Whether an ended build made its version; None: it has not ended, or nobody knows it."""
        record = self.ended.get(name)
        return None if record is None else record.state is BuildState.DONE

    def look(self, facts: SlotFacts, mark: Callable[[dict[str, ActiveJob]], None]) -> SlotFacts:
        """The same facts with lanes and builds. `mark` notes in place who is to park."""
        if not self.members:
            return facts
        table = self._lanes.table(facts.table, unit_nodes(self._mesh))
        open_lanes = self._lanes.open(facts)
        waiting, holding = [], dict[str, ActiveJob]()
        for name, build in self.members.items():
            build.keep_to(open_lanes)
            if (job := build.waiting) is not None:
                waiting.append(job)
            elif build.holds:
                holding[name] = build.active
        mark(holding)
        with_waiting = replace(facts, queue=(*facts.queue, *waiting))
        return with_builds(with_waiting, table, open_lanes, holding.values())

    def admit(self, admission: Admission) -> bool:
        """Gives a build the lanes with which it starts; False: it is none of these, or has some meanwhile."""
        build = self.members.get(admission.job)
        if build is None or build.waiting is None or build.held:
            return False
        log.info("build admitted", build=admission.job, lanes=len(admission.slots), reason=admission.reason)
        build.take(admission.slots)
        return True

    def resize(self, resize: Resize) -> bool:
        """Has a build take or leave lanes; False: it is none of these."""
        build = self.members.get(resize.job)
        if build is None:
            return False
        if resize.leaves:
            log.info("build gives up lanes", build=resize.job, reason=resize.reason)
        build.leave(resize.leaves)
        if build.holds:  # else it has ended or parked meanwhile
            build.take(resize.takes)
        return True

    def tell(self, name: str, hold: Hold) -> bool:
        """Tells a build why it waits; False: it is none of these."""
        build = self.members.get(name)
        if build is None:
            return False
        # one that is too wide for the mesh waits for nodes; one after what failed waits in vain
        build.wait(hold.reason, never=hold.cause is Cause.NEVER and bool(hold.blocker))
        return True
