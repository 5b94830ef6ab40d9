"""Closes the connections of clients that lose the right to be connected.

A guard learns of revocations and ended jobs by watching the buckets. From then on it refuses new connections
of these clients, and it has the servers close the open ones. It repeats that until all servers have answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from bus.tasks import background
from entities.authorizer.connections.job_states import JobStates
from entities.authorizer.disconnection import Disconnections
from schemas.access import Revocation


@dataclass(frozen=True, kw_only=True)
class ExpulsionConfig:
    """Timing of expulsions."""

    skew_s: float = 30.0  # how far the clock of the process that revokes may be behind ours
    apart_s: float = 1e-6  # least time between two revocations of one user
    stopping_s: float = 3.0  # how long an instance may still write its log after its job has ended
    retry_first_s: float = 1.0
    retry_most_s: float = 30.0


class Expulsions:
    """Closes connections of revoked credentials, of users with revoked tokens, and of ended jobs' instances.

    Old revocations are delivered again whenever the bucket is read anew. For users, only revocations during
    the watch count, because a later connection was made with a newer token. A revoked credential stays
    revoked.
    """

    def __init__(
        self, disconnections: Disconnections, jobs: JobStates, config: ExpulsionConfig = ExpulsionConfig()
    ) -> None:
        self._config = config
        self._disconnections = disconnections
        self._jobs = jobs
        self._since = time.time() - config.skew_s
        self._last_revocation: dict[tuple[str, str], float] = {}
        self._waiting: dict[tuple[str, str], None] = {}
        self._has_work = asyncio.Event()
        self._job_ended = asyncio.Event()
        jobs.on_ended = self._job_ended.set

    def revoked(self, revocation: Revocation) -> None:
        key = (revocation.kind, revocation.id)
        if revocation.kind == "credential":
            if key not in self._last_revocation:
                self._last_revocation[key] = revocation.at
                self._queue(key)
        elif revocation.at >= max(self._since, self._last_revocation.get(key, 0.0) + self._config.apart_s):
            self._last_revocation[key] = revocation.at
            self._queue(("user", revocation.user))

    def _queue(self, key: tuple[str, str]) -> None:
        self._waiting[key] = None
        self._has_work.set()

    @asynccontextmanager
    async def carried_out(self) -> AsyncIterator[None]:
        """Carry out expulsions until the block ends."""
        async with background(self._end_revoked()), background(self._end_jobs()):
            yield

    async def _end_revoked(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            pause_s = self._config.retry_first_s
            while self._waiting:
                for kind, id in tuple(self._waiting):
                    if kind == "credential":
                        ended = await self._disconnections.disconnect_credential(id)
                    else:
                        ended = await self._disconnections.disconnect(id)
                    if ended is not None:
                        self._waiting.pop((kind, id), None)
                if self._waiting:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, self._config.retry_most_s)

    async def _end_jobs(self) -> None:
        while True:
            await self._job_ended.wait()
            self._job_ended.clear()
            pause_s = self._config.stopping_s
            while True:
                await asyncio.sleep(pause_s)
                if await self._disconnections.disconnect_jobs(self._jobs.ended) is not None:
                    break
                pause_s = min(2 * pause_s, self._config.retry_most_s)
