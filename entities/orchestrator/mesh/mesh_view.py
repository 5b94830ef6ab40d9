"""What the orchestrator knows of the mesh: node agents, gateways, routers, and every instance's record.

It is fed by registrations with the orchestrator (draft §4.4(1)) and by the registry's bucket. Readers wait
for a change instead of polling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from bus.logs import get_logger
from bus.messaging.key_value import Change
from entities.orchestrator.mesh.cordons import CordonBook
from entities.orchestrator.mesh.node_links import NodeLinks
from entities.orchestrator.planning.plan_requests import MeshNetwork
from schemas.automation import Automation
from schemas.cluster import Cordon, NodeStatus, Slot
from schemas.envelope import EntityKind
from schemas.errors import DmscError, Unavailable
from schemas.fault import ClusterReport
from schemas.registry import InstanceState, ServiceRecord
from schemas.signals import NodeRegistration, QosReport
from schemas.step import Member
from schemas.task_graph import Placement

log = get_logger("orchestrator")

_Result = TypeVar("_Result")

LEAVING = (InstanceState.DRAINING, InstanceState.FAULTED, InstanceState.GONE)


async def unless(
    work: Coroutine[Any, Any, _Result], end: Coroutine[Any, Any, object], error: DmscError
) -> _Result:
    """Awaits `work` and returns its result; raises `error` if `end` returns first."""
    work_task, end_task = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait({work_task, end_task}, return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise error
    finally:
        work_task.cancel()
        end_task.cancel()


def _abilities(status: NodeStatus) -> object:
    """What a node's slots can do, whoever is in them and however fast they are: equal if it is the same."""
    slots = [
        (slot.index, slot.device_kind, slot.memory_bytes, slot.bits_class, slot.precisions, slot.labels)
        for slot in status.slots
    ]
    return status.incarnation, status.warm, slots


class MeshView:
    """The present state of the mesh. All calls on the event loop."""

    def __init__(
        self, timeout: Callable[[float], AbstractAsyncContextManager[object]] = asyncio.timeout
    ) -> None:
        """`timeout`: what `until` waits with.

        The timeout of the bus (`bus.nats.liveness`) stands still while the bus is away, so that an outage of
        the bus does not count as silence of others.
        """
        self.nodes: dict[str, NodeStatus] = {}
        self.services: dict[str, NodeRegistration] = {}
        self.records: dict[str, ServiceRecord] = {}
        self.cordons = CordonBook()
        self.links = NodeLinks()
        self.topology = MeshNetwork()
        """Of the operator; without one the network is what jobs have measured."""
        self.automation = Automation.ACT
        """How far jobs are changed without a person; a job's own mode may be lower."""
        self.quality: dict[tuple[str, str], QosReport] = {}
        self._lost_nodes: set[str] = set()
        self._conditions: dict[str, ClusterReport] = {}  # of instances that are not well, by SID
        self.on_leaving: Callable[[ServiceRecord], None] = lambda record: None
        """Called with each record of an instance that drains, has failed, or is gone."""
        self._timeout = timeout
        self._departed: dict[str, ServiceRecord] = {}
        self._changed = asyncio.Condition()
        self.changes = 0
        """How often anything has changed."""
        self._abilities: dict[str, object] = {}  # of nodes, by SID
        self._other_abilities = 0  # how often they have changed
        self._extent: tuple[tuple[int, ...], object] = (), None

    async def _notify(self) -> None:
        self.changes += 1
        async with self._changed:
            self._changed.notify_all()

    async def nudge(self) -> None:
        """Wakes all that wait for a change, so that they look again."""
        await self._notify()

    async def node(self, status: NodeStatus) -> None:
        """A node agent registered, or its slots changed."""
        self.nodes[status.sid] = status
        if self._abilities.get(status.sid) != (abilities := _abilities(status)):
            self._abilities[status.sid] = abilities
            self._other_abilities += 1
        if status.warm:
            self._lost_nodes.discard(status.sid)
        await self._notify()

    def judged_lost(self, agent: str) -> None:
        """A fault reaches this agent's whole node: nothing is placed there until it says that it is warm."""
        self._lost_nodes.add(agent)

    def judged(self, report: ClusterReport) -> None:
        """Notes what the agent of its node says of an instance."""
        if report.condition == "well":
            self._conditions.pop(report.sid, None)
        else:
            self._conditions[report.sid] = report

    def waiting_for(self, member: Member) -> list[str]:
        """Which instances have stood still for long because they wait for this one, as their agents say."""
        return [
            f"{report.sid} waits for it, says {report.agent}"
            for report in self._conditions.values()
            if report.scope == "none" and member.sid in report.chain.waits_for
        ]

    def open_nodes(self) -> list[NodeStatus]:
        """The registered nodes that were not judged lost since their last word."""
        return [status for sid, status in self.nodes.items() if sid not in self._lost_nodes]

    def extent(self) -> object:
        """Open nodes, what their slots can do, and cordons: equal as long as the mesh, were it empty, has the
        same room.

        It is made anew only after a change: thousands of jobs that fit nowhere ask for it.
        """
        when = self.changes, len(self.nodes), len(self._lost_nodes)  # to forget or lose a node is no news
        if self._extent[0] != when:
            nodes = frozenset(node.sid for node in self.open_nodes())
            cordons = {agent: frozenset(places) for agent, places in self.cordons.places().items()}
            self._extent = when, (nodes, self._other_abilities, cordons)
        return self._extent[1]

    def all_agents_heard(self) -> bool:
        """Whether each agent that the registry knows as active has said which slots it has."""
        agents = self.of_kind(EntityKind.CLUSTER)
        return all(each.sid in self.nodes for each in agents if each.state is InstanceState.ACTIVE)

    def sealing_keys(self) -> dict[str, str]:
        """The agents of all nodes, each with the key to which its secrets are sealed."""
        return {sid: status.sealing_key for sid, status in self.nodes.items()}

    def network(self) -> MeshNetwork:
        """What lies between nodes, as far as that is known."""
        if self.topology.topology is not None:
            return self.topology
        return MeshNetwork(bytes_per_s=self.links.bytes_per_s())

    def forget_node(self, agent: str) -> None:
        """Forgets an agent that does not answer: nothing is placed there until it registers again."""
        self.nodes.pop(agent, None)
        self._abilities.pop(agent, None)

    async def while_there(self, agent: str, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Awaits `work`, which needs this agent, unless the agent leaves meanwhile.

        Raises:
            Unavailable: it has left.
        """
        return await unless(
            work, self._until_left(agent), Unavailable(f"node agent {agent} has left the mesh")
        )

    async def _until_left(self, agent: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: agent not in self.nodes)

    async def cordon(self, cordon: Cordon) -> None:
        """A place was cordoned, or its cordon has changed."""
        self.cordons.put(cordon)
        await self._notify()

    async def cordoned(self, cordons: Iterable[Cordon]) -> None:
        """Replaces all cordons by these."""
        self.cordons = CordonBook()
        for cordon in cordons:
            self.cordons.put(cordon)
        await self._notify()

    async def uncordon(self, cordon: Cordon) -> None:
        """A place is open again."""
        self.cordons.remove(cordon)
        await self._notify()

    async def service(self, registration: NodeRegistration) -> None:
        """A gateway or router registered."""
        self.services[registration.sid] = registration
        await self._notify()

    async def record(self, change: Change) -> None:
        """The registry's bucket has changed."""
        if change.message is not None and change.message.sid != change.key:
            # When the key is removed, the other service's record would stay here for good.
            log.warning("a record under another service's key", key=change.key, sid=change.message.sid)
            return
        if change.message is not None:
            before = self.records.get(change.message.sid)
            if before is not None and before.job and before.incarnation != change.message.incarnation:
                self._departed[before.sid] = before  # replaced: others still ask how it ended
            self.records[change.message.sid] = change.message
            if change.message.kind is EntityKind.CLUSTER:
                if before is None or before.state is not change.message.state:
                    self._other_abilities += 1  # only an active node's slots are given to jobs
                self.links.take(change.message)
            if change.message.state in (InstanceState.GONE, InstanceState.FAULTED):
                self._left(change.message.sid)
            if change.message.state in LEAVING and change.message.job is not None:
                self.on_leaving(change.message)
        elif change.key:
            self._gone(change.key)
            self._left(change.key)
        await self._notify()

    def _gone(self, sid: str) -> None:
        """A record was removed; that of an instance is remembered until its job is forgotten."""
        record = self.records.pop(sid, None)
        if record is not None and record.job is not None:
            self._departed[sid] = record.model_copy(update={"state": InstanceState.GONE})
            self.on_leaving(self._departed[sid])

    def runs(self, sid: str) -> bool:
        """Whether the registry knows this service as running."""
        record = self.records.get(sid)
        return record is not None and record.state not in (InstanceState.GONE, InstanceState.FAULTED)

    def report(self, report: QosReport) -> None:
        """Notes a Type 5 report of a gateway or router: the quality of a job's traffic in its cluster."""
        if report.job is not None:
            self.quality[report.sid, report.job] = report

    def forget_job(self, job: str) -> None:
        for key in [key for key in self.quality if key[1] == job]:
            del self.quality[key]
        for sid in [sid for sid, record in self._departed.items() if record.job == job]:
            del self._departed[sid]
        self._conditions = {sid: each for sid, each in self._conditions.items() if each.job != job}

    def last_of(self, member: Member) -> ServiceRecord | None:
        """The present or last record of this incarnation, if there was one."""
        for record in (self.records.get(member.sid), self._departed.get(member.sid)):
            if record is not None and record.incarnation == member.incarnation:
                return record
        return None

    async def last_words(self, member: Member, within_s: float) -> ServiceRecord | None:
        """The last record of an ended incarnation, if there is one; waits `within_s` for its end."""
        await self.until(lambda: self.has_ended(member), within_s)
        return self.last_of(member)

    def known(self, sid: str) -> Member | None:
        """The incarnation that the registry knows under this SID, in whichever state, if there is one."""
        record = self.records.get(sid)
        return None if record is None else Member(sid=sid, incarnation=record.incarnation)

    def _left(self, sid: str) -> None:
        if self.nodes.pop(sid, None) is not None:
            self.links.forget(sid)
            self._abilities.pop(sid, None)
        self.services.pop(sid, None)

    def gateways(self, clusters: tuple[str, ...] | None = None) -> list[str]:
        """SIDs of registered gateways in order; of these clusters only, if `clusters` is given."""
        return self._of("gateway", clusters)

    def routers(self, clusters: tuple[str, ...] | None = None) -> list[str]:
        return self._of("router", clusters)

    def _of(self, kind: str, clusters: tuple[str, ...] | None) -> list[str]:
        return sorted(
            entry.sid
            for entry in self.services.values()
            if entry.kind == kind and (clusters is None or entry.endpoint.cluster in clusters)
        )

    def agent_of(self, cluster: str, node: str) -> str | None:
        """The SID of the agent of this node, if it is registered."""
        return next(
            (
                status.sid
                for status in self.nodes.values()
                if (status.cluster, status.node) == (cluster, node)
            ),
            None,
        )

    def slots_of(self, placements: Iterable[Placement]) -> list[Slot | None]:
        """The slots at these places; None: its node is not there, or it is in none."""
        nodes = {(status.cluster, status.node): status for status in self.nodes.values()}
        return [
            None if (node := nodes.get((place.cluster, place.node))) is None else node.slot(place.slot)
            for place in placements
        ]

    def has_ended(self, member: Member) -> bool:
        """The registry says that this incarnation is faulted or gone."""
        return self.state_of(member) in (InstanceState.FAULTED, InstanceState.GONE)

    def state_of(self, member: Member) -> InstanceState | None:
        """The registry's state of this incarnation; GONE if another incarnation has replaced it."""
        own = self.last_of(member)
        if own is not None:
            return own.state
        return InstanceState.GONE if member.sid in self.records else None

    def of_kind(self, kind: EntityKind) -> list[ServiceRecord]:
        return [record for record in self.records.values() if record.kind is kind]

    async def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `condition` holds; returns False if `timeout_s` passed first."""
        async with self._changed:
            try:
                async with self._timeout(timeout_s):
                    await self._changed.wait_for(condition)
            except TimeoutError:
                return False
        return True

    def open_places(self) -> frozenset[tuple[str, int]]:
        """All slots that are not cordoned, as (agent, index), whether something runs there or not."""
        closed = self.cordons.places()
        return frozenset(
            (node.sid, slot.index)
            for node in self.nodes.values()
            for slot in node.slots
            if not {None, slot.index} & set(closed.get(node.sid, ()))
        )

    async def until_open_otherwise(self, before: frozenset[tuple[str, int]]) -> None:
        """Returns once a place is open that was not among `before`.

        A place that closes meanwhile leaves `before`, and counts if it opens again.
        """
        while not self.open_places() - before:
            before &= self.open_places()
            await self.next_change()

    async def until_changed(self, seen: int) -> None:
        """Returns once there are more changes than `seen`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.changes != seen)

    async def next_change(self) -> None:
        async with self._changed:
            await self._changed.wait()
