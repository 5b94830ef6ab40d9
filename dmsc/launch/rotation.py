"""A new root of all credentials, of a mesh that runs or of one that does not (ADR-0039).

Who asks for it writes three files and has done. Whoever runs the mesh finds a root that its processes do not
have, gives each a new credential, waits until node agents have given theirs to their instances, and writes
down that the old root's connections may be ended, which the guard does. So it does not matter who is killed
meanwhile: what is written down says what is left to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn

from bus.logs import get_logger
from bus.security.credentials import new_root
from bus.security.identity import is_root
from bus.security.trust_roots import HANDING_OVER_S
from dmsc.client.async_client import AsyncClient
from dmsc.launch.layout import ChildSpec
from dmsc.state import renewals
from dmsc.state.identities import credentials
from dmsc.state.state_folder import StateFolder, locked
from schemas.errors import BadInput, DmscError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dmsc.launch.supervisor import Supervisor

log = get_logger("rotation")

KEPT = 8
"""Roots whose seals can still be opened."""
LOOK_S = 0.5
TAKE_S = 20.0
"""How long node agents are waited for: they write a file for each instance."""
HAND_OVER_S = 45.0
"""How long the command waits for the mesh."""

Say = Callable[[str], None]


@contextmanager
def _alone(folder: StateFolder) -> Iterator[bool]:
    """Whether nobody else is writing the files of a rotation just now."""
    with locked(folder.path / "rotation.lock") as mine:
        yield mine


def begin(folder: StateFolder, grace_s: float) -> bool:
    """Writes a new root down. The old one counts for `grace_s`, and at least until all have new credentials.

    Returns whether a mesh runs, which then hands them over.

    Raises:
        BadInput: there is no root to replace, or another rotation is just being written down.
        Unavailable: the mesh has not handed over the last one yet.
    """
    root = folder.bus_token()
    if root is None or not is_root(root):
        raise BadInput(f"{folder.path}: there is no root of credentials to replace")
    with _alone(folder) as mine:
        if not mine:
            raise BadInput(f"{folder.path}: another rotation is being written down; try again")
        runs = folder.owner() is not None
        with nullcontext() if runs else folder.hold():
            folder.mend_roots(root)
            roots = folder.roots()
            if runs and roots.under_way:
                raise Unavailable(f"{folder.path}: the last rotation is under way; try again in a minute")
            fresh = new_root()
            before = tuple(dict.fromkeys((root, *folder.roots_before())))[:KEPT]
            now = time.time()
            replaced = roots.replaced_by(fresh, grace_s, now, HANDING_OVER_S if runs else 0.0)
            folder.write_root(fresh, before, replaced, fresh_keys=not runs)
        return runs


async def handed_over(folder: StateFolder) -> None:
    """Waits until the mesh that runs has the new root, nobody is connected by an older one for whom it was
    replaced, and all gateways answer again.

    Raises:
        Unavailable: it takes too long, or the mesh is gone.
    """
    try:
        async with asyncio.timeout(HAND_OVER_S):
            while (roots := folder.roots()).under_way or not roots.have_ended(folder.roots_file):
                await _pause(folder)
            for url in (folder.mesh() or _gone()).gateways.values():
                async with AsyncClient(url, token=folder.token()) as client:
                    while not await _answers(client):
                        await _pause(folder)
    except TimeoutError:
        raise Unavailable("the new root is there, and not everybody has come back by it yet") from None


async def _pause(folder: StateFolder) -> None:
    if folder.owner() is None:
        _gone()
    await asyncio.sleep(LOOK_S / 5)


def _gone() -> NoReturn:
    raise Unavailable("the mesh has ended meanwhile; it has the new root when it is started again")


async def _answers(client: AsyncClient) -> bool:
    try:
        await client.mesh()
    except DmscError:
        return False
    return True


class HandingOver:
    """New roots for the children of one mesh."""

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        self._given: dict[str, str] = {}  # child → the root of its credential

    def secrets_of(self, child: ChildSpec) -> dict[str, str]:
        """What a child that starts is told alone: its credential, and where its next one will be."""
        folder, root = self._folder, self._folder.bus_token() or ""
        renewals.forget(folder, child.name)
        self._given[child.name] = root
        text = credentials(root, child.identities, folder.roots_before())
        return {"DMSC_BUS_TOKEN": text, renewals.VARIABLE: str(renewals.place_of(folder, child.name))}

    @asynccontextmanager
    async def followed(self, supervisor: Supervisor, say: Say) -> AsyncIterator[None]:
        """Hands new roots over, until the end of the block."""
        task = asyncio.create_task(self._follow(supervisor, say), name="rotation")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self, supervisor: Supervisor, say: Say) -> None:
        if not is_root(self._folder.bus_token() or ""):
            return
        while True:
            try:
                await self._look(supervisor, say)
            except (DmscError, OSError) as error:  # a full disk: the next look may find room
                log.warning("a rotation of the root is not carried on", reason=str(error))
            await asyncio.sleep(LOOK_S)

    async def _look(self, supervisor: Supervisor, say: Say) -> None:
        folder, root = self._folder, self._folder.bus_token()
        if root is None or not folder.roots_file.exists():
            return
        with _alone(folder) as mine:
            if not mine:
                return
            folder.mend_roots(root)
        if not folder.roots().under_way:
            return
        await self._hand_over(root, supervisor)
        with _alone(folder) as mine:
            roots = folder.roots()
            if mine and roots.under_way and folder.bus_token() == root:
                folder.write_roots(roots.handed(time.time()))
                say("a new root of credentials: all processes have theirs")

    async def _hand_over(self, root: str, supervisor: Supervisor) -> None:
        folder = self._folder
        agents: dict[str, str] = {}
        for child in supervisor.children:
            if not child.identities or self._given.get(child.name) == root:
                continue
            if child.users_code:  # confined: it sees no file of ours
                await supervisor.replace(child)
                continue
            self._given[child.name] = root
            text = credentials(root, child.identities, folder.roots_before())
            renewals.give(folder, child.name, text)
            if child.arguments[0] == "join":
                agents[child.name] = text
        deadline = time.monotonic() + TAKE_S
        while not all(renewals.has_taken(folder, name, text) for name, text in agents.items()):
            if time.monotonic() > deadline:
                log.warning("a node agent has not taken its new credential yet", agents=sorted(agents))
                return
            await asyncio.sleep(LOOK_S / 5)
