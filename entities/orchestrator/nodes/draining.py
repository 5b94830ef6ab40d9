"""Draining of nodes and of slots of broken devices: instances move elsewhere, one at a time, between steps.

This service asks a job's run to move one instance at a time, and checks what is left; the run decides how the
state is handed over. No instance is moved that would find no slot elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from bus.logs import get_logger
from entities.orchestrator.job.job_run import JobRun
from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.nodes.cordon_service import CordonService
from schemas.cluster import Cordon
from schemas.errors import DmscError

log = get_logger("orchestrator")

EMPTY = "empty"
"""`progress` of a drain that is done."""


class Draining:
    """Empties the places that are being drained.

    Args:
        runs: the running jobs, by id.
        confirmed: returns while this orchestrator leads.
        look_every_s: pause before the jobs on draining nodes are asked again.
    """

    def __init__(
        self,
        mesh: MeshView,
        cordoning: CordonService,
        runs: Mapping[str, JobRun],
        confirmed: Callable[[], Awaitable[None]],
        *,
        look_every_s: float = 0.5,
    ) -> None:
        self._look_every_s = look_every_s
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
            if drains:  # whether an instance may leave depends on its job's run, which has no event for it
                await asyncio.sleep(self._look_every_s)
            else:
                await self._mesh.next_change()

    async def _push(self, cordon: Cordon) -> None:
        try:
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
        waits = ""
        for run, sid in left:
            why = run.drain(sid)
            if not why:
                return f"{len(left)} left; {sid} is moving"
            waits = waits or f"{sid}: {why}"
        return f"{len(left)} left; {waits}"

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
