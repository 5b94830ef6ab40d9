"""Setting and lifting cordons, for operators, for nodes that leave, and for devices that report errors.

Cordons are kept in the bucket `cordons`, so that neither a restart of the orchestrator nor one of the node
agent lifts them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator.faults.fault_queue import FaultQueue
from entities.orchestrator.mesh.cordons import affected_slots, find_node, works_on
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.cluster import Cordon, Departure, LeaveNotice, NodeStatus
from schemas.envelope import Envelope
from schemas.errors import Ack, BadInput, Conflict, NotFound, Refused
from schemas.fault import FaultReport, FaultTask, FaultVerdict
from schemas.gateway_api import CordonPlace, Cordons, UncordonPlace
from schemas.step import Member
from schemas.task_graph import Placement

log = get_logger("orchestrator")

WHOLE_NODE = "node"
"""Takes the place of the slot in the key of a whole node's cordon."""


class CordonService:
    """Serves cordon, drain, leave and uncordon, and drains devices that report errors."""

    def __init__(self, bus: Bus, mesh: MeshView, faults: FaultQueue) -> None:
        self._bus = bus
        self._mesh = mesh
        self._faults = faults
        self._bucket = bus.bucket(subjects.CORDON)
        self._turn = asyncio.Lock()
        """Held by each change, so that no other one comes between its reading and its writing."""

    async def load(self) -> None:
        """Reads all cordons from the bucket; they replace those of an earlier term of this process."""
        entries = await self._bucket.entries(strict=True)
        await self._mesh.cordoned([entry.message for entry in entries if isinstance(entry.message, Cordon)])

    async def cordon(self, message: CordonPlace, envelope: Envelope) -> Cordons:
        """Cordons a place, or drains a node; if it is cordoned already, the newer reason counts.

        Raises:
            NotFound: no such node or slot.
            BadInput: several nodes have that name; or a drain of a single slot.
        """
        agent, cluster, node = find_node(message.node, self._mesh.nodes.values(), self._mesh.cordons)
        if message.drain and message.slot is not None:
            raise BadInput(f"{message.node}/{message.slot}: whole nodes are drained, slots cordoned")
        self._check_slot(agent, message.slot)
        cordon = Cordon(
            agent=agent,
            cluster=cluster,
            node=node,
            slot=message.slot,
            reason=message.reason or ("drained" if message.drain else "cordoned"),
            by=message.user,
            at=time.time(),
            draining=message.drain,
        )
        async with self._turn:
            before = self._mesh.cordons.of(agent, message.slot)
            if before is not None and before.leaves is not None:  # it leaves all the same, and stays so after
                kept = {"cordoned": True, "drained": message.drain}
                leaves = before.leaves.model_copy(update=kept)
                cordon = cordon.model_copy(update={"draining": True, "leaves": leaves})
            await self._keep(cordon)
            return self._answer(agent)

    async def uncordon(self, message: UncordonPlace, envelope: Envelope) -> Cordons:
        """Opens a slot, or a whole node with all its slots; a drain under way ends.

        Raises:
            NotFound: no such node, or nothing is cordoned there.
            BadInput: several nodes have that name.
        """
        agent, _, _ = find_node(message.node, self._mesh.nodes.values(), self._mesh.cordons)
        self._check_slot(agent, message.slot)
        async with self._turn:
            whole_node = self._mesh.cordons.of(agent, None)
            if message.slot is None and whole_node is not None and whole_node.leaves is not None:
                by = f"by {clock(whole_node.leaves.until)} ({whole_node.reason})"
                raise Conflict(
                    f"{agent} leaves {by}: nobody can take that back; it is open again once its agent is back"
                )
            cordons = [
                cordon
                for cordon in self._mesh.cordons.active(agent)
                if message.slot is None or cordon.slot == message.slot
            ]
            if not cordons:
                place = agent if message.slot is None else f"{agent}/{message.slot}"
                whole = " by itself; the whole node is" if self._mesh.cordons.whole(agent) else ""
                raise NotFound(f"{place} is not cordoned{whole}; `dmsc nodes` shows what is")
            for cordon in cordons:
                await self._lift(cordon, message.user)
            return self._answer(agent)

    async def leave(self, message: LeaveNotice, envelope: Envelope) -> Cordons:
        """A node goes away, at a deadline: it is cordoned, and drained at once (`Draining`).

        A repetition changes nothing, and of several deadlines the soonest counts.

        Raises:
            NotFound: no such node, or it is away already.
            BadInput: several nodes have that name, or it is told as a signal to its agent.
            Conflict: that incarnation of its agent is not the present one.
        """
        if message.source == "signal":  # nobody would tell the agent, which would never go
            raise BadInput("source signal: only a node's agent says so: give person, cloud, taint or other")
        return await self._leave(message)

    async def _leave(self, message: LeaveNotice) -> Cordons:
        agent, cluster, node = find_node(message.node, self._mesh.nodes.values(), self._mesh.cordons)
        async with self._turn:
            status = self._mesh.nodes.get(agent)
            if status is None:
                raise NotFound(f"{agent} is away: nothing of it is left that could leave")
            if message.incarnation not in (None, status.incarnation):
                raise Conflict(f"{agent} runs as {status.incarnation}, not as {message.incarnation}")
            now, before = time.time(), self._mesh.cordons.of(agent, None)
            leaves = Departure(
                until=now + message.deadline_s, incarnation=status.incarnation, source=message.source
            )
            if before is not None and not before.lifted:
                former = before.leaves
                if former is None:
                    leaves = leaves.model_copy(update={"cordoned": True, "drained": before.draining})
                elif former.incarnation == leaves.incarnation:
                    if former.until <= leaves.until:
                        return self._answer(agent)
                    kept = {"cordoned": former.cordoned, "drained": former.drained}
                    leaves = leaves.model_copy(update=kept)
            await self._keep(
                Cordon(
                    agent=agent,
                    cluster=cluster,
                    node=node,
                    reason=message.reason or f"leaves ({message.source})",
                    by=message.by,
                    at=now,
                    draining=True,
                    leaves=leaves,
                )
            )
            return self._answer(agent)

    async def left(self, message: LeaveNotice, envelope: Envelope) -> Ack:
        """The same, by the node's own agent.

        Raises:
            NotFound: its node is away.
            Refused: it says so of another node.
        """
        if message.node != envelope.sender.name:
            raise Refused(
                f"{envelope.sender.name} says that {message.node} leaves: agents speak of their own"
            )
        if message.node not in self._mesh.nodes:  # nor is it the name of a node of another cluster
            raise NotFound(f"{message.node} is away: nothing of it is left that could leave")
        await self._leave(message)
        return Ack()

    async def end_leave(self, cordon: Cordon) -> None:
        """That incarnation of an agent is gone: its node is open again, unless it was cordoned before."""
        async with self._turn:
            if cordon.leaves is None or self._mesh.cordons.of(cordon.agent, cordon.slot) is not cordon:
                return
            if cordon.leaves.cordoned:
                kept = {"draining": cordon.leaves.drained, "leaves": None, "progress": ""}
                await self._keep(cordon.model_copy(update=kept))
            else:
                await self._lift(cordon, self._bus.sender.name)

    async def tell_progress(self, cordon: Cordon, progress: str) -> None:
        """How far a drain is; nothing if it was lifted, or another took its place, since it was looked at."""
        async with self._turn:
            if self._mesh.cordons.of(cordon.agent, cordon.slot) is cordon:
                await self._keep(cordon.model_copy(update={"progress": progress}))

    def _check_slot(self, agent: str, slot: int | None) -> None:
        status = self._mesh.nodes.get(agent)
        if slot is None or status is None or not status.slots:  # it is away or warming up: slots are unknown
            return
        if status.slot(slot) is not None:
            return
        raise NotFound(f"{agent} has no slot {slot}; it has {len(status.slots)}, numbered from 0")

    async def _lift(self, cordon: Cordon, user: str) -> None:
        log.info("uncordoned", agent=cordon.agent, slot=cordon.slot, by=user)
        if cordon.ecc_errors:  # the driver's count never falls: only further errors may drain it again
            await self._keep(cordon.model_copy(update={"lifted": True, "by": user, "at": time.time()}))
            return
        await self._bucket.delete(agent=cordon.agent, slot=_key(cordon))
        await self._mesh.uncordon(cordon)

    async def _keep(self, cordon: Cordon) -> None:
        """Writes a cordon; from here on it is in force, and survives this process."""
        await self._bucket.put(cordon, agent=cordon.agent, slot=_key(cordon))
        await self._mesh.cordon(cordon)
        if not cordon.lifted:
            log.info(
                "cordoned",
                agent=cordon.agent,
                slot=cordon.slot,
                reason=cordon.reason,
                by=cordon.by,
                draining=cordon.draining,
                leaves_by=None if cordon.leaves is None else clock(cordon.leaves.until),
                progress=cordon.progress,
            )

    def _answer(self, agent: str) -> Cordons:
        return Cordons(agent=agent, cordons=self._mesh.cordons.active(agent))

    async def device(self, report: FaultReport, placed: Placement | None) -> None:
        """Drains the slots of a device that reports errors.

        Its slots get no new instances, and its instances move elsewhere, as for a drain. If there is no room
        elsewhere, they go on working, and the progress of the drain says so.

        Args:
            report: the report of an instance on that device.
            placed: the instance's placement by its job.
        """
        async with self._turn:  # the instances of one device report it at the same time
            await self._close_device(report, placed)

    async def _close_device(self, report: FaultReport, placed: Placement | None) -> None:
        record = self._mesh.last_of(Member(sid=report.sid, incarnation=report.incarnation))
        if record is None or report.device is None:
            return
        where = record.endpoint
        agent = self._mesh.agent_of(where.cluster, where.node)
        status = self._mesh.nodes.get(agent) if agent is not None else None
        if status is None:
            return
        if not works_on(status, report.device.device, report.sid, placed):
            log.warning(
                "an instance tells of a device that it is not on: ignored",
                sid=report.sid,
                agent=status.sid,
                device=report.device.device,
            )
            return
        slots = affected_slots(status, report.device, self._mesh.cordons)
        if not slots:
            return
        task = FaultTask(job=None, sid=status.sid, device=report.device.device)
        fault = self._faults.opened("device", task, reporter=report.reporter, log=(report.evidence,))
        verdict = FaultVerdict(
            job=report.job,
            sid=report.sid,
            incarnation=report.incarnation,
            verdict="structural",
            scope="node",
            action=f"drain {_words(status, slots)}",
            reason=str(report.device),
        )
        self._faults.located(fault, verdict)
        for slot in slots:
            await self._keep(
                Cordon(
                    agent=status.sid,
                    cluster=status.cluster,
                    node=status.node,
                    slot=slot,
                    reason=str(report.device),
                    by=self._bus.sender.name,
                    at=time.time(),
                    ecc_errors=report.device.ecc_errors,
                    draining=True,
                )
            )
        self._faults.handled(fault, f"draining {_words(status, slots)}")


def clock(at: float) -> str:
    """A time of day, for people."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def _key(cordon: Cordon) -> str:
    return WHOLE_NODE if cordon.slot is None else str(cordon.slot)


def _words(status: NodeStatus, slots: Iterable[int]) -> str:
    return f"{status.sid}, slots {', '.join(map(str, slots))}"
