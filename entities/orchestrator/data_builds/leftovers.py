"""Objects of builds to which nobody refers: they go when a build is done, and when its work is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from bus import subjects
from bus.connection import Bus
from bus.files.artifacts import SCHEME, open_on_bus
from bus.logs import get_logger
from entities.job_files.node_files import files_of
from entities.orchestrator.mesh.mesh_view import MeshView
from schemas.data_set.commands import RemoveObjects
from schemas.errors import DmscError, NotFound, Unavailable

log = get_logger("orchestrator")

AT_ONCE = 8
"""Objects of the bus that are removed at a time."""
NAMES = 1024
"""Names in one order to a node."""


class BuildObjects:
    """The objects in the folders of builds, on the bus, or elsewhere through node agents.

    `answer_s`: deadline of one order to a node agent.
    """

    def __init__(self, bus: Bus, mesh: MeshView, *, answer_s: float = 30.0) -> None:
        self._bus = bus
        self._mesh = mesh
        self._answer_s = answer_s

    async def names(self, folder: str, secrets: str = "") -> set[str]:
        """Names of all objects in a folder.

        Raises:
            DmscError: they can't be listed now.
        """
        agents = {sid: node.sealing_key for sid, node in self._mesh.nodes.items()}
        try:
            return set(await files_of(folder, self._bus, lambda: agents, secrets=secrets).list())
        except NotFound:
            return set()

    async def remove_but(self, folder: str, kept: Collection[str], secrets: str = "") -> None:
        """Removes all objects of a folder but `kept`. What fails is logged, and stays."""
        try:
            names = sorted(await self.names(folder, secrets) - set(kept))
            if folder.startswith(SCHEME):
                await self._remove_on_bus(folder, names)
            else:
                await self._remove_elsewhere(folder, names, secrets)
        except DmscError as error:
            log.warning("objects of a build not removed", folder=folder, reason=error.text)
        else:
            log.info("objects of a build removed", folder=folder, objects=len(names))

    async def _remove_on_bus(self, folder: str, names: Iterable[str]) -> None:
        artifacts, turns = open_on_bus(folder, self._bus), asyncio.Semaphore(AT_ONCE)

        async def remove(name: str) -> None:
            async with turns:
                await artifacts.delete_one(name)

        await asyncio.gather(*(remove(name) for name in names))

    async def _remove_elsewhere(self, folder: str, names: list[str], secrets: str) -> None:
        for start in range(0, len(names), NAMES):
            piece = tuple(names[start : start + NAMES])
            order = RemoveObjects(folder=folder, names=piece, secrets=secrets)
            await self._ask(order)

    async def _ask(self, order: RemoveObjects) -> None:
        """Has one node remove the objects; the next one is asked if it does not answer."""
        last: DmscError = Unavailable("no node has joined")
        for agent, node in sorted(self._mesh.nodes.items()):
            try:
                await self._bus.command(
                    subjects.REMOVE_OBJECTS,
                    order,
                    deadline_s=self._answer_s,
                    while_heard=True,
                    agent=agent,
                    seal_to=node.sealing_key,
                )
                return
            except DmscError as error:
                last = error
        raise last
