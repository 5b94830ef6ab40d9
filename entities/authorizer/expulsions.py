"""Who loses the right to be connected while connected: their connections are ended, whoever took the right.

A guard hears of revocations and of the ends of jobs by watching the buckets. It refuses whoever knocks from
that moment on, and has the servers end what is open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from entities.authorizer.evictions import Evictions
from entities.authorizer.job_states import JobStates
from schemas.access import Revocation

SKEW_S = 30.0
"""How far the clock of who revokes may be behind ours."""
TICK_S = 1e-6
"""Two revocations of one user are this far apart at least."""
LAST_WORDS_S = 3.0
"""After its job has ended, an instance that is being stopped may still write its log this long."""


class Expulsions:
    """Ends connections of revoked credentials, of instances of jobs that ended and, with `users`, of users.

    Without `users`, who revokes a user's tokens ends the connections, too. Older revocations come again
    whenever the bucket is read anew: of users only what is revoked while we watch counts, since who comes in
    later came by a newer token; a credential that is revoked stays so.
    """

    def __init__(self, evictions: Evictions, jobs: JobStates, *, users: bool = False) -> None:
        self._evictions = evictions
        self._jobs = jobs
        self._users = users
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
        elif self._users and revocation.at >= max(self._since, self._done.get(what, 0.0) + TICK_S):
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
            while self._waiting:
                kind, id = next(iter(self._waiting))
                del self._waiting[kind, id]
                if kind == "credential":
                    await self._evictions.throw_out_credential(id)
                else:
                    await self._evictions.throw_out(id)

    async def _end_jobs(self) -> None:
        while True:
            await self._job_ended.wait()
            self._job_ended.clear()
            await asyncio.sleep(LAST_WORDS_S)
            await self._evictions.throw_out_jobs(self._jobs.ended)
