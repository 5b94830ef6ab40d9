"""Draining of nodes and of slots of broken devices: instances move elsewhere, one at a time, between steps.

This service asks a job's run to move one instance at a time, and checks what is left; the run decides how the
state is handed over. No instance is moved that would find no slot elsewhere. If the node itself leaves, all
of its instances are asked at once, and whatever room there is (ADR-0170).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.nodes.cordon_service import CordonService, clock
from schemas.cluster import Cordon, LeaveNotice
from schemas.errors import DmscError

log = get_logger("orchestrator")

EMPTY = "empty"
"""`progress` of a drain that is done."""


class Draining:
    """Empties the places that are being drained.

    Args:
        bus: by which agents are told to leave.
        runs: the running jobs, by id.
        confirmed: returns while this orchestrator leads.
        look_every_s: pause before the jobs on draining nodes are asked again.
        order_s: how long an agent may take to answer the order to leave, before it is repeated.
    """

    def __init__(
        self,
        bus: Bus,
        mesh: MeshView,
        cordoning: CordonService,
        runs: Mapping[str, JobRun],
        confirmed: Callable[[], Awaitable[None]],
        *,
        look_every_s: float = 0.5,
        order_s: float = 2.0,
    ) -> None:
        self._bus = bus
        self._look_every_s = look_every_s
        self._order_s = order_s
        self._ordered: dict[str, float] = {}  # incarnations of agents that know that they leave, and by when
        self._mesh = mesh
        self._cordoning = cordoning
        self._runs = runs
        self._confirmed = confirmed

    async def run(self) -> None:
        """Drains until cancelled; goes on with drains that an earlier orchestrator began."""
        while True:
            await self._confirmed()
            drains = [cordon for cordon in self._mesh.cordons.active() if cordon.draining]
            for cordon in drains:
                await self._push(cordon)
            await asyncio.gather(*(self._tell_agent(cordon) for cordon in drains))
            if drains:  # whether an instance may leave depends on its job's run, which has no event for it
                await asyncio.sleep(self._look_every_s)
            else:
                await self._mesh.next_change()

    async def _push(self, cordon: Cordon) -> None:
        try:
            if self._is_over(cordon):
                await self._cordoning.end_leave(cordon)
                return
            progress = self._ask_next(cordon)
            if progress != cordon.progress:
                await self._cordoning.tell_progress(cordon, progress)
        except DmscError as error:
            log.warning("drain held up", agent=cordon.agent, reason=str(error))
        except Exception as error:  # one job's trouble must not end the orchestrator
            log.error("drain held up", agent=cordon.agent, exc_info=error)

    def _ask_next(self, cordon: Cordon) -> str:
        """Asks for the first instance that can leave; returns in words what is left."""
        left = self._left(cordon)
        if not left:
            return EMPTY
        if cordon.leaves is not None:
            return self._ask_all(left, cordon.leaves.until)
        waits = ""
        for run, sid in left:
            why = run.drain(sid)
            if not why:
                return f"{len(left)} left; {sid} is moving"
            waits = waits or f"{sid}: {why}"
        return f"{len(left)} left; {waits}"

    def _ask_all(self, left: Iterable[tuple[JobRun, str]], until: float) -> str:
        """Asks for all that are left on a node that leaves; returns in words how they do."""
        left_s = max(0.0, until - time.time())
        said = {sid: self._ask(run, sid, left_s) for run, sid in left}
        hows = "; ".join(f"{sid} {how or 'is moving'}" for sid, how in sorted(said.items()))
        return f"{len(said)} left by {clock(until)}; {hows}"

    def _ask(self, run: JobRun, sid: str, left_s: float) -> str:
        try:
            return run.drain(sid, left_s)
        except Exception as error:  # the others have no time to wait until this one's trouble is over
            log.error("leave held up", sid=sid, exc_info=error)
            return f"is held up: {error}"

    def _is_over(self, cordon: Cordon) -> bool:
        """Whether a node that was to leave has left: another agent has its name, or none and it is time."""
        if cordon.leaves is None:
            return False
        status = self._mesh.nodes.get(cordon.agent)
        if status is None:
            return time.time() > cordon.leaves.until
        return status.incarnation != cordon.leaves.incarnation

    async def _tell_agent(self, cordon: Cordon) -> None:
        """Has the agent of a node that leaves know by when, once: what it said itself it knows."""
        leaves = cordon.leaves
        if leaves is None or leaves.source == "signal":
            return
        if self._ordered.get(leaves.incarnation) == leaves.until:
            return
        status = self._mesh.nodes.get(cordon.agent)
        if status is None or status.incarnation != leaves.incarnation:
            return
        notice = LeaveNotice(
            node=cordon.agent,
            deadline_s=max(0.0, leaves.until - time.time()),
            source=leaves.source,
            reason=cordon.reason,
            by=cordon.by,
            incarnation=leaves.incarnation,
        )
        try:
            await self._bus.command(
                subjects.LEAVE, notice, deadline_s=self._order_s, cause=None, agent=cordon.agent
            )
        except DmscError as error:  # it is asked again at the next look
            log.warning("agent not told to leave", agent=cordon.agent, reason=str(error))
        else:
            self._ordered[leaves.incarnation] = leaves.until

    def _left(self, cordon: Cordon) -> list[tuple[JobRun, str]]:
        return [
            (run, place.sid)
            for run in self._runs.values()
            if not run.over
            for place in run.placements
            if (place.cluster, place.node) == (cordon.cluster, cordon.node)
            and cordon.slot in (None, place.slot)
            and place.sid in run.job.instances.members
        ]
