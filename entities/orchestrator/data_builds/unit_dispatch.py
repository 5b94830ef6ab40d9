"""Units on their way to node agents and back: who gets which, and what an attempt gave.

Units run beside training: their processes have the lowest priority of the operating system, so that they take
what cores training leaves. A node takes as many at a time as it has free slots, and one if it has none.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from bus.connection import Bus
from bus.subjects import PREPARE_UNIT
from bus.tasks import cancel
from entities.orchestrator.data_builds.progress import UnitTimes
from entities.orchestrator.data_builds.unit_ledger import AgentLoad, Unit
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.queue.queued_builds import unit_nodes
from schemas.cluster import NodeStatus
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.commands import PrepareUnit, UnitPrepared
from schemas.errors import Unavailable


@dataclass(frozen=True, kw_only=True)
class DispatchTimes:
    """Deadlines and periods, in seconds."""

    accept_s: float = 30.0
    """How long an agent may take to accept a unit."""
    repeat_s: float = 10.0
    """Period after which an order is sent again: an agent whose result was lost sends that again. To one that
    was restarted, and knows nothing of it, it is sent at once."""


class UnitDispatch:
    """The units of one build that agents work on. `working`: units of all builds, by agent."""

    def __init__(
        self,
        bus: Bus,
        mesh: MeshView,
        build: str,
        spec: DataBuildSpec,
        user: str,
        working: Counter[str],
        times: DispatchTimes = DispatchTimes(),
    ) -> None:
        self._bus = bus
        self._mesh = mesh
        self._build = build
        self._spec = spec
        self._user = user
        self._working = working
        self._times = times
        self._answers: dict[tuple[str, str, int], asyncio.Future[UnitPrepared]] = {}

    def loads(self, times: UnitTimes) -> list[AgentLoad]:
        """The agents that may have units now. `times`: of the present phase."""
        clusters, closed = self._spec.clusters, self._mesh.cordons.places()
        loads = []
        for node in unit_nodes(self._mesh):
            sid = node.sid
            if clusters and node.cluster not in clusters:
                continue
            slots = [slot for slot in node.slots if slot.index not in closed.get(sid, ())]
            if not slots:
                continue
            room = max(1, sum(slot.busy_with is None for slot in slots))
            loads.append(AgentLoad(sid, room, self._working[sid], times.of(sid)))
        return loads

    def take(self, agent: str) -> None:
        """Counts a unit as worked on by the agent, until `free`."""
        self._working[agent] += 1

    def free(self, agent: str) -> None:
        self._working[agent] -= 1

    async def give(self, unit: Unit, secrets: str) -> UnitPrepared:
        """Has the agent to which the unit is bound do it; returns what that gave.

        Raises:
            Unavailable: the agent has left, or does not accept it.
            DmscError: it refuses.
        """
        agent, repetition = unit.agent, 0 if unit.result is None else 1
        key = (unit.key, agent, repetition)
        self._answers[key] = answer = asyncio.get_running_loop().create_future()
        order = PrepareUnit(
            build=self._build,
            unit=unit.key,
            repetition=repetition,
            spec=self._spec,
            order=unit.order,
            secrets=secrets,
            user=self._user,
        )
        try:
            return await self._mesh.while_there(agent, self._ordered(order, agent, answer))
        finally:
            if self._answers.get(key) is answer:
                del self._answers[key]

    async def _ordered(
        self, order: PrepareUnit, agent: str, answer: asyncio.Future[UnitPrepared]
    ) -> UnitPrepared:
        while not answer.done():
            node = self._mesh.nodes.get(agent)  # forgotten without a word by a job that it has not answered
            if node is None:
                raise Unavailable(f"node agent {agent} has left the mesh")
            await self._bus.command(
                PREPARE_UNIT,
                order,
                deadline_s=self._times.accept_s,
                while_heard=True,
                agent=agent,
                seal_to=node.sealing_key,
            )
            restart = asyncio.create_task(self._until_restarted(node))
            either: set[asyncio.Future[Any]] = {answer, restart}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel(restart)
        return answer.result()

    async def _until_restarted(self, node: NodeStatus) -> None:
        """Returns once another incarnation of the agent is there, or the order is to be sent again anyway."""

        def is_another() -> bool:
            present = self._mesh.nodes.get(node.sid)
            return present is not None and present.incarnation != node.incarnation

        await self._mesh.until(is_another, self._times.repeat_s)

    def prepared(self, message: UnitPrepared, agent: str) -> bool:
        """An agent tells what a unit gave; False: it was not asked for that."""
        answer = self._answers.get((message.unit, agent, message.repetition))
        if answer is None:
            return False
        if not answer.done():
            answer.set_result(message)
        return True
