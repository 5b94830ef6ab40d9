"""New instances for lost ones, while the job goes on without them (DESIGN §5 rule 10)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from functools import partial

from bus.logs import get_logger
from bus.subjects import STOP_INSTANCE
from entities.orchestrator.job_state.context import JobContext, why_not_eligible
from entities.orchestrator.job_state.instances import NodeLost, NotReady, StartFailed
from entities.orchestrator.job_state.retry_limits import Unrecoverable
from entities.orchestrator.planning.kept_apart import has_rules, nodes_for, unfit_for
from entities.orchestrator.planning.placement import Cordoned, NoRoom, is_cordoned, place
from entities.orchestrator.recovery.partition import Node, avoided, name
from schemas.cluster import InstanceStop, NodeStatus
from schemas.errors import DmscError
from schemas.fault_choices import Replace
from schemas.job import NodeCut
from schemas.step import Member
from schemas.task_graph import Placement, TaskUnit, UnitKind

log = get_logger("orchestrator")

CUTS_KEPT = 16
"""Network partitions that a job's record remembers: the latest."""
STARTS = 5
"""Starts of one unit in a row that ended by themselves before it is given up, if no replica has its state."""


class Replacement:
    """Finds room for lost units of one job and starts their next incarnations."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._times = job.times.recovery
        self._placing = asyncio.Lock()
        self.homeless: dict[str, str] = {}
        """Units for which there is no room now, with the reason."""
        self._sent_away: dict[str, tuple[Placement, str | None]] = {}
        self._wishes: dict[str, Replace] = {}
        self.cuts = job.store.record.cuts
        """Network partitions that the job has met; nodes that were given up get nothing (see `partition`)."""

    async def bring(self, sid: str, lost: Member | None, *, dispensable: bool = False) -> Member:
        """Ends what is left of a lost instance, and starts its unit again where there is room.

        It waits for room, and repeats failed starts, as long as that takes.

        Args:
            sid: the unit.
            lost: the incarnation before, which is ended first.
            dispensable: the job can do without the unit, if it repeatedly fails to start.

        Returns:
            The newcomer, built and ready to take the state.

        Raises:
            Unrecoverable: it repeatedly fails to start.
        """
        unit = self._job.instances.graph.unit(sid)
        own_ends, pause_s = 0, self._times.start_retry_s
        while True:
            if lost is not None:
                await self.end(lost)
            await self._find_room(unit)
            try:
                joins = self._job.spec.serve is None  # there is no step that it could come too early for
                (started,) = await self._job.instances.start([unit], joins=joins)
                if self.node_of(sid) not in self._avoided():
                    self.stay(sid)
                    self._wishes.pop(sid, None)
                    return started
                lost = started  # its node was given up during the start
                self._job.instances.mark_lost(lost)
            except StartFailed as error:
                lost = error.member
                self._job.instances.mark_lost(lost)
                own_ends += 1
                if own_ends >= STARTS and (dispensable or not self._has_state(unit)):
                    raise Unrecoverable(
                        f"{unit.sid} could not be started {STARTS} times, the last: {error}"
                    ) from None
                await self._job.store.reason(f"{unit.sid} is not replaced yet: {error.text}")
            except NodeLost as error:
                if error.agent is not None:
                    self._job.mesh.forget_node(error.agent)
                log.info("not replaced yet", job=self._job.name, sid=unit.sid, reason=str(error))
            except NotReady as error:
                (lost,) = error.members
                self._job.instances.mark_lost(lost)
                log.info("not replaced yet", job=self._job.name, sid=unit.sid, reason=str(error))
            except DmscError as error:  # an agent or the registry is being restarted
                log.info("not replaced yet", job=self._job.name, sid=unit.sid, reason=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._times.start_retry_most_s)

    def _has_state(self, unit: TaskUnit) -> bool:
        """Whether another member of its stage lives and has the state."""
        others = (other.sid for other in self._job.instances.graph.stage(unit.stage) if other.sid != unit.sid)
        members = (self._job.instances.members.get(sid) for sid in others)
        return any(member is not None and self._job.instances.is_present(member) for member in members)

    def no_room(self, units: list[TaskUnit]) -> str:
        """Why these units can't be placed now (a placed unit: elsewhere); empty if they can."""
        placed = self._place(units, self._job.instances.graph.placements)
        return placed.reason if isinstance(placed, NoRoom) else ""

    def finds_room(self) -> bool:
        """Whether there is room now for one of the units in `homeless`."""
        return any(not self.no_room([self._job.instances.graph.unit(sid)]) for sid in self.homeless)

    def send_away(self, sid: str, agent: str | None) -> None:
        """From now on the unit's present slot is closed to the job; it goes to this agent's, or any other."""
        self._sent_away[sid] = (self._job.instances.graph.placement(sid), agent)

    def stay(self, sid: str) -> None:
        """Withdraws `send_away`."""
        self._sent_away.pop(sid, None)

    def wish(self, sid: str, where: Replace) -> None:
        """The unit's next incarnation goes where this says, as long as there is room for it there."""
        self._wishes[sid] = where

    async def until_back(self, sid: str, timeout_s: float) -> bool:
        """Returns once the unit's own slot can host it again; False if the time passed first."""
        unit = self._job.instances.graph.unit(sid)
        return await self._job.mesh.until(lambda: self.may_stay(unit), timeout_s)

    def is_open(self, sid: str) -> bool:
        """Whether its node is registered, and its slot may host a new instance."""
        agent, slot = self._job.instances.agent_of(sid), self._job.instances.graph.placement(sid).slot
        return agent is not None and not is_cordoned(self._closed(self._avoided()), agent, slot)

    def unfit_for(self, sid: str, stage: int) -> str:
        """Why the slot of an instance may not host one of another stage; empty if it may."""
        agent = self._job.instances.agent_of(sid)
        node = self._job.mesh.nodes.get(agent) if agent is not None else None
        return unfit_for(self._job.instances.graph, stage, sid, node)

    async def until_free(self, unit: TaskUnit) -> None:
        """Returns once the unit's slot is free for it, or the wait for that is over."""
        await self._job.mesh.until(lambda: self.may_stay(unit), self._times.free_s)

    # --- nodes that are left out ----------------------------------------------------------------------
    def node_of(self, sid: str) -> Node:
        """The node on which the present incarnation of a unit was placed."""
        where = self._job.instances.graph.placement(sid)
        return where.cluster, where.node

    def avoid(self, cut: NodeCut) -> None:
        """Notes a partition: for a while, nothing of the job goes to the node that was given up."""
        others = (other for other in self.cuts if (other.kept, other.given_up) != (cut.kept, cut.given_up))
        self.cuts = (*others, cut)[-CUTS_KEPT:]

    def fits_without(self, node: Node) -> bool:
        """Whether all units that the job has on this node fit on other nodes, beside the rest of the job."""
        graph = self._job.instances.graph
        leaving = [unit for unit in graph.units if self.node_of(unit.sid) == node]
        others = [place for place in graph.placements if (place.cluster, place.node) != node]
        return not isinstance(self._place(leaving, others, without=node), NoRoom)

    def _avoided(self) -> Mapping[Node, NodeCut]:
        present = {
            self.node_of(member.sid)
            for member in self._job.instances.members.values()
            if self._job.instances.is_present(member)
        }
        return avoided(self.cuts, present, time.time())

    def _closed(self, nodes: Iterable[Node]) -> dict[str, set[int | None]]:
        """The places that placement leaves out: cordoned ones, and these nodes."""
        closed = self._job.mesh.cordons.places()
        for cluster, node in nodes:
            agent = self._job.mesh.agent_of(cluster, node)
            if agent is not None:
                closed.setdefault(agent, set()).add(None)
        for left, _ in self._sent_away.values():
            agent = self._job.mesh.agent_of(left.cluster, left.node)
            if agent is not None:
                closed.setdefault(agent, set()).add(left.slot)
        return closed

    async def end(self, member: Member) -> None:
        """Ends the process of an instance, so that its slot is free and it can't wake up again."""
        agent = self._job.instances.agent_of(member.sid)
        if agent is None:
            return
        stop = InstanceStop(job=self._job.name, sid=member.sid, incarnation=member.incarnation, now=True)
        try:
            await self._job.bus.command(
                STOP_INSTANCE,
                stop,
                deadline_s=self._times.stop_s,
                while_heard=True,
                agent=agent,
            )
        except DmscError as error:
            log.warning("an instance was not stopped", sid=member.sid, reason=str(error))

    async def _find_room(self, unit: TaskUnit) -> None:
        """Keeps the unit's slot if it is free and its node registered, else places it; waits for room."""
        try:
            while True:
                in_turn = self._placing if unit.kind is UnitKind.STAGE else contextlib.nullcontext()
                async with in_turn:  # a data instance takes no slot
                    why = self._settle(unit)
                if not why:
                    break
                if unit.sid in self._sent_away:  # better where it was than nowhere
                    self.stay(unit.sid)
                    continue
                self.homeless[unit.sid] = why
                await self._job.store.reason(f"{unit.sid}: {why}")
                await self._job.mesh.next_change()
        finally:
            waited = self.homeless.pop(unit.sid, None)
        if waited is not None:
            left = [f"{sid}: {why}" for sid, why in self.homeless.items()]
            await self._job.store.reason("; ".join(left) or f"{unit.sid} has found room")

    def _settle(self, unit: TaskUnit) -> str:
        """Places the unit; returns why that is impossible now, or ''."""
        instances = self._job.instances
        if self.may_stay(unit) and self._is_wished(unit.sid):
            return ""
        others = tuple(other for other in instances.graph.placements if other.sid != unit.sid)
        placed = self._place([unit], others)
        if isinstance(placed, NoRoom) and self._wishes.pop(unit.sid, None) is not None:
            return self._settle(unit)  # better anywhere than nowhere
        if isinstance(placed, NoRoom):
            return placed.reason
        instances.graph = instances.graph.model_copy(update={"placements": (*others, *placed)})
        return ""

    def _is_wished(self, sid: str) -> bool:
        """Whether the slot that the unit has is one that a wish allows."""
        agent, slot = self._job.instances.agent_of(sid), self._job.instances.graph.placement(sid).slot
        node = self._job.mesh.nodes.get(agent or "")
        left = [] if node is None else self._wished(sid, [node])
        return sid not in self._wishes or any(one.slot(slot) is not None for one in left)

    def _wished(self, sid: str, nodes: list[NodeStatus]) -> list[NodeStatus]:
        """The nodes, with the slots, that a wish allows for this unit; all without one."""
        wish = self._wishes.get(sid)
        if wish is None:
            return nodes
        kinds = set(wish.avoid_kinds)
        return [
            node.model_copy(
                update={"slots": tuple(slot for slot in node.slots if slot.device_kind not in kinds)}
            )
            for node in nodes
            if node.sid not in wish.avoid and wish.prefer in (None, node.sid)
        ]

    def _place(
        self, units: list[TaskUnit], others: Iterable[Placement], without: Node | None = None
    ) -> tuple[Placement, ...] | NoRoom:
        left_out = self._avoided()
        placing = partial(
            self._place_on,
            units,
            others=[*others],
            cordoned=self._closed([*left_out, *([without] if without else [])]),
        )
        placed = placing(self._job.eligible_nodes())
        if isinstance(placed, NoRoom) and not isinstance(placing([*self._job.mesh.nodes.values()]), NoRoom):
            return NoRoom(f"{placed.reason}; there is room, but {why_not_eligible(self._job)}")
        if not isinstance(placed, NoRoom) or not left_out:
            return placed
        why = "; ".join(f"{name(node)} is left out: {cut.reason}" for node, cut in left_out.items())
        return NoRoom(f"{placed.reason} ({why})")

    def _place_on(
        self, units: list[TaskUnit], nodes: list[NodeStatus], *, others: list[Placement], cordoned: Cordoned
    ) -> tuple[Placement, ...] | NoRoom:
        """Where places depend on each other, one after the other."""
        graph = self._job.instances.graph
        placed: list[Placement] = []
        for batch in [[unit] for unit in units] if has_rules(graph) else [units]:
            there = [*others, *placed]
            left = nodes_for(graph, batch[0], nodes, there) if has_rules(graph) else nodes
            _, goal = self._sent_away.get(batch[0].sid, (None, None))
            if goal is not None and not isinstance(left, str):
                left = [node for node in left if node.sid == goal]
            if len(batch) == 1 and not isinstance(left, str):
                left = self._wished(batch[0].sid, left)
            if isinstance(left, str):
                return NoRoom(f"{batch[0].sid}: {left} leaves it no node: waiting for one")
            found = place(
                batch,
                left,
                clusters=self._job.store.record.spec.parallel.clusters,
                occupied=self._taken(there),
                cordoned=cordoned,
            )
            if isinstance(found, NoRoom):
                return found
            placed += found
        return tuple(placed)

    def may_stay(self, unit: TaskUnit) -> bool:
        """Whether its node is registered, and its slot is free, not promised to others, and not cordoned."""
        graph = self._job.instances.graph
        where = next((place for place in graph.placements if place.sid == unit.sid), None)
        if where is None:
            return False
        agent = self._job.mesh.agent_of(where.cluster, where.node)
        if agent is None or is_cordoned(self._closed(self._avoided()), agent, where.slot):
            return False
        if unit.is_data:
            return True
        others = [*graph.placements, *self._job.queue.occupied(self._job.name).get(agent, [])]
        if any(
            other.sid != unit.sid
            and (other.cluster, other.node, other.slot) == (where.cluster, where.node, where.slot)
            for other in others
        ):
            return False
        slots = (node.slot(where.slot) for node in self._job.eligible_nodes() if node.sid == agent)
        return any(slot is not None and slot.busy_with in (None, unit.sid) for slot in slots)

    def _taken(self, own: Iterable[Placement]) -> dict[str, tuple[Placement, ...]]:
        """Slots promised to other jobs and to the rest of this one, by node agent."""
        taken = self._job.queue.occupied(self._job.name)
        for placement in own:
            agent = self._job.mesh.agent_of(placement.cluster, placement.node)
            if agent is not None and placement.slot >= 0:
                taken[agent] = (*taken.get(agent, ()), placement)
        return taken
