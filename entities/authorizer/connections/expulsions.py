"""Who loses the right to be connected while connected: their connections are ended, whoever took the right.

A guard hears of revocations and of the ends of jobs by watching the buckets. It refuses whoever knocks from
that moment on, and has the servers end what is open; where a server did not answer, again and again until all
have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from entities.authorizer.connections.job_states import JobStates
from entities.authorizer.disconnection import Disconnections
from schemas.access import Revocation

SKEW_S = 30.0
"""How far the clock of who revokes may be behind ours."""
TICK_S = 1e-6
"""Two revocations of one user are this far apart at least."""
LAST_WORDS_S = 3.0
"""After its job has ended, an instance that is being stopped may still write its log this long."""
AGAIN_FIRST_S, AGAIN_MOST_S = 1.0, 30.0
"""Pauses before what did not work is tried again."""


class Expulsions:
    """Ends connections of revoked credentials, of users whose tokens were revoked, and of instances of jobs
    that ended.

    Older revocations come again whenever the bucket is read anew. Of users only what is revoked while we
    watch counts, since who comes in later came by a newer token. A credential that is revoked stays so.
    """

    def __init__(self, evictions: Disconnections, jobs: JobStates) -> None:
        self._evictions = evictions
        self._jobs = jobs
        self._since = time.time() - SKEW_S
        self._done: dict[tuple[str, str], float] = {}
        self._waiting: dict[tuple[str, str], None] = {}
        self._some = asyncio.Event()
        self._job_ended = asyncio.Event()
        jobs.heard = self._job_ended.set

    def revoked(self, revocation: Revocation) -> None:
        what = (revocation.kind, revocation.id)
        if revocation.kind == "credential":
            if what not in self._done:
                self._done[what] = revocation.at
                self._wait_for(what)
        elif revocation.at >= max(self._since, self._done.get(what, 0.0) + TICK_S):
            self._done[what] = revocation.at
            self._wait_for(("user", revocation.user))

    def _wait_for(self, what: tuple[str, str]) -> None:
        self._waiting[what] = None
        self._some.set()

    @asynccontextmanager
    async def carried_out(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._end_revoked()), asyncio.create_task(self._end_jobs())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_revoked(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            pause_s = AGAIN_FIRST_S
            while self._waiting:
                for kind, id in tuple(self._waiting):
                    if kind == "credential":
                        ended = await self._evictions.throw_out_credential(id)
                    else:
                        ended = await self._evictions.throw_out(id)
                    if ended is not None:
                        self._waiting.pop((kind, id), None)
                if self._waiting:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, AGAIN_MOST_S)

    async def _end_jobs(self) -> None:
        while True:
            await self._job_ended.wait()
            self._job_ended.clear()
            pause_s = LAST_WORDS_S
            while True:
                await asyncio.sleep(pause_s)
                if await self._evictions.throw_out_jobs(self._jobs.ended) is not None:
                    break
                pause_s = min(2 * pause_s, AGAIN_MOST_S)
