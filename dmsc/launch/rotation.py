"""Rotation: replaces the root of all credentials of a mesh, whether it runs or not (ADR-0039).

The command `dmsc credential rotate` only writes three files. The process that runs the mesh notices a root
that its processes do not have. It gives each process a new credential, waits until node agents have passed
new credentials to their instances, and records that the old root's connections may be ended; the auth callout
ends them. Any process may be killed meanwhile, because the files say what is left to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from bus.logs import get_logger
from bus.security.credentials import new_root
from bus.security.identity import is_root
from dmsc.client.async_client import AsyncClient
from dmsc.launch.layout import ChildSpec
from dmsc.state import renewals
from dmsc.state.identities import credentials
from dmsc.state.state_folder import StateFolder, locked
from schemas.errors import BadInput, DmscError, Unavailable
from schemas.limits import HANDING_OVER_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dmsc.launch.supervisor import Supervisor

log = get_logger("rotation")

KEPT = 8
"""How many former roots are kept, so that values sealed with them can still be opened."""


@dataclass(frozen=True, kw_only=True)
class RotationTimes:
    """How often a rotation of the root is looked for, and how long its parts may take."""

    look_s: float = 0.5
    take_s: float = 20.0
    """For node agents, which write a file for each instance."""
    hand_over_s: float = 45.0
    """For which the command waits for the mesh."""
    poll_s: float = 0.1


Say = Callable[[str], None]


@contextmanager
def _lock(folder: StateFolder) -> Iterator[bool]:
    """Try to lock the files of a rotation for the block; yield whether that worked."""
    with locked(folder.path / "rotation.lock") as acquired:
        yield acquired


def begin(folder: StateFolder, grace_s: float) -> bool:
    """Write a new root. The old root stays valid for `grace_s`, and at least until all have new credentials.

    Returns whether a mesh runs, which then hands new credentials over.

    Raises:
        BadInput: There is no root to replace, or another rotation is being written.
        Unavailable: The mesh has not completed the previous rotation yet.
    """
    root = folder.bus_token()
    if root is None or not is_root(root):
        raise BadInput(f"{folder.path}: there is no root of credentials to replace")
    with _lock(folder) as acquired:
        if not acquired:
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


async def handed_over(folder: StateFolder, times: RotationTimes = RotationTimes()) -> None:
    """Wait until the running mesh uses the new root and all gateways answer again.

    By then, connections with credentials of the old root have ended, if their owners got new credentials.

    Raises:
        Unavailable: It takes too long, or the mesh has ended.
    """
    try:
        async with asyncio.timeout(times.hand_over_s):
            while (roots := folder.roots()).under_way or not roots.have_ended(folder.roots_file):
                await _pause(folder, times.poll_s)
            for url in (folder.mesh() or _gone()).gateways.values():
                async with AsyncClient(url, token=folder.token()) as client:
                    while not await _answers(client):
                        await _pause(folder, times.poll_s)
    except TimeoutError:
        raise Unavailable("the new root is there, and not everybody has come back by it yet") from None


async def _pause(folder: StateFolder, seconds: float) -> None:
    if folder.owner() is None:
        _gone()
    await asyncio.sleep(seconds)


def _gone() -> NoReturn:
    raise Unavailable("the mesh has ended meanwhile; it has the new root when it is started again")


async def _answers(client: AsyncClient) -> bool:
    try:
        await client.mesh()
    except DmscError:
        return False
    return True


class HandingOver:
    """Gives the children of one mesh credentials of a new root."""

    def __init__(self, folder: StateFolder, times: RotationTimes = RotationTimes()) -> None:
        self._folder = folder
        self._times = times
        self._roots: dict[str, str] = {}  # child → the root of its credential
        self._settled: tuple[int, ...] = ()  # times of the files when no rotation was under way

    def secrets_of(self, child: ChildSpec) -> dict[str, str]:
        """The environment that only this starting child gets: its credential, and where the next will be."""
        folder, root = self._folder, self._folder.bus_token() or ""
        renewals.forget(folder, child.name)
        self._roots[child.name] = root
        text = credentials(root, child.identities, folder.roots_before())
        return {"DMSC_BUS_TOKEN": text, renewals.VARIABLE: str(renewals.place_of(folder, child.name))}

    async def follow(self, supervisor: Supervisor, say: Say) -> None:
        """Hand new credentials over whenever the root changes, until it is cancelled."""
        if not is_root(self._folder.bus_token() or ""):
            return
        while True:
            try:
                await self._check(supervisor, say)
            except (DmscError, OSError) as error:  # a full disk, for example: the next attempt may succeed
                log.warning("a rotation of the root is not carried on", reason=str(error))
            await asyncio.sleep(self._times.look_s)

    async def _check(self, supervisor: Supervisor, say: Say) -> None:
        """Complete a rotation that is under way, if there is one."""
        times = self._folder.times_of_roots()
        if times and times == self._settled:
            return  # reading keys costs more than all else that a launcher does
        folder, root = self._folder, self._folder.bus_token()
        if root is None or not folder.roots_file.exists():
            return
        with _lock(folder) as acquired:
            if not acquired:
                return
            folder.mend_roots(root)
        if not folder.roots().under_way:
            self._settled = times
            return
        await self._hand_over(root, supervisor)
        with _lock(folder) as acquired:
            roots = folder.roots()
            if acquired and roots.under_way and folder.bus_token() == root:
                folder.write_roots(roots.handed(time.time()))
                say("a new root of credentials: all processes have theirs")

    async def _hand_over(self, root: str, supervisor: Supervisor) -> None:
        """Give each child a credential of the new root, and wait until the node agents have taken theirs."""
        folder = self._folder
        agents: dict[str, str] = {}
        for child in supervisor.children:
            if not child.identities or self._roots.get(child.name) == root:
                continue
            if child.users_code:  # a confined child can't read the new credential's file
                await supervisor.replace(child)
                continue
            self._roots[child.name] = root
            text = credentials(root, child.identities, folder.roots_before())
            renewals.give(folder, child.name, text)
            if child.arguments[0] == "join":
                agents[child.name] = text
        deadline = time.monotonic() + self._times.take_s
        while not all(renewals.has_taken(folder, name, text) for name, text in agents.items()):
            if time.monotonic() > deadline:
                log.warning("a node agent has not taken its new credential yet", agents=sorted(agents))
                return
            await asyncio.sleep(self._times.poll_s)
