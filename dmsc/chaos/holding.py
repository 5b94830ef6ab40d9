"""Faults that last for a while and end by themselves: a stopped server, a mesh without free slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from bus.tasks import TaskSet
from dmsc.chaos.patience import persistently
from dmsc.chaos.processes import ProcessHandle, resume
from dmsc.client.async_client import AsyncClient
from schemas.errors import DmscError, NotFound

REASON = "chaos: no room"


class Holding:
    """Ends lasting faults when they are due. At the end of `async with` none is left.

    Args:
        client: Cordons and uncordons nodes as an operator does; cordons of others are not touched.
        frozen: Handles of stopped processes; resumed processes are removed from the list.
        say: Gets lines for people.
    """

    def __init__(self, client: AsyncClient, frozen: list[ProcessHandle], say: Callable[[str], None]) -> None:
        self._client = client
        self._frozen = frozen
        self._say = say
        self._ends = TaskSet()
        self._closed: set[str] = set()

    async def __aenter__(self) -> Holding:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        resume(self._frozen)  # first, because no gateway answers while the server is stopped
        await self._ends.close()
        await self._open_mesh()

    def thaw_after(self, delay_s: float, handles: Sequence[ProcessHandle]) -> None:
        """Resume these processes after `delay_s` seconds."""

        async def end() -> None:
            await asyncio.sleep(delay_s)
            resume(handles)
            self._frozen[:] = [handle for handle in self._frozen if handle not in handles]

        self._ends.create(end())

    async def close_mesh(self, delay_s: float) -> None:
        """Cordon all nodes for `delay_s` seconds."""
        nodes = await persistently(self._client.nodes)
        for node in nodes:
            sid = node.status.sid
            if not any(cordon.slot is None for cordon in node.cordons):
                await persistently(partial(self._client.cordon, sid, reason=REASON))
                self._closed.add(sid)

        async def end() -> None:
            await asyncio.sleep(delay_s)
            await self._open_mesh()

        self._ends.create(end())

    async def _open_mesh(self) -> None:
        for sid in sorted(self._closed):
            try:
                await persistently(partial(self._client.uncordon, sid))
            except NotFound:
                pass  # somebody else has uncordoned it
            except DmscError as error:
                self._say(f"{sid} is still cordoned: dmsc uncordon {sid} ({error.text})")
            self._closed.discard(sid)
