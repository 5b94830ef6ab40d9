"""Faults that last for a while: a server that stands still, a mesh without room. Both end by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType

from dmsc.chaos.patience import persistently
from dmsc.chaos.processes import ProcessHandle, resume
from dmsc.client.async_client import AsyncClient
from schemas.errors import DmscError, NotFound

REASON = "chaos: no room"


class Holding:
    """`async with` it: at the end nothing is held any more.

    Args:
        client: cordons and lifts cordons, as an operator does; others' cordons are left alone.
        frozen: handles of processes that stand still; those that go on leave it.
    """

    def __init__(self, client: AsyncClient, frozen: list[ProcessHandle], say: Callable[[str], None]) -> None:
        self._client = client
        self._frozen = frozen
        self._say = say
        self._ends: set[asyncio.Task[None]] = set()
        self._closed: set[str] = set()

    async def __aenter__(self) -> Holding:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        resume(self._frozen)  # first: nobody answers a client while the server stands still
        for end in self._ends:
            end.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)
        await self._open_mesh()

    def thaw_after(self, delay_s: float, held: Sequence[ProcessHandle]) -> None:
        """These processes go on by then."""

        async def end() -> None:
            await asyncio.sleep(delay_s)
            resume(held)
            self._frozen[:] = [one for one in self._frozen if one not in held]

        self._begin(end())

    async def close_mesh(self, delay_s: float) -> None:
        """No node takes anything new, until `delay_s` from now."""
        nodes = await persistently(self._client.nodes)
        for node in nodes:
            sid = node.status.sid
            if not any(one.slot is None for one in node.cordons):
                await persistently(partial(self._client.cordon, sid, reason=REASON))
                self._closed.add(sid)

        async def end() -> None:
            await asyncio.sleep(delay_s)
            await self._open_mesh()

        self._begin(end())

    async def _open_mesh(self) -> None:
        for sid in sorted(self._closed):
            try:
                await persistently(partial(self._client.uncordon, sid))
            except NotFound:
                pass  # somebody else has lifted it
            except DmscError as error:
                self._say(f"{sid} is still cordoned: dmsc uncordon {sid} ({error.text})")
            self._closed.discard(sid)

    def _begin(self, end: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(end)
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
