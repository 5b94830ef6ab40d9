"""What a job needs of the bus outside its steps: tried again for as long as that is what is missing.

A server that stands still or is away, a full disk, a registry that can't write: none of it is the job's
fault, and none ends it. What the bus answers about the job itself goes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from bus.logs import get_logger
from schemas.errors import Unavailable

log = get_logger("orchestrator")

QUIET_S = 20.0
"""A job says what it waits for after so long."""
AGAIN_S, AGAIN_MOST_S = 0.2, 5.0
"""Pause before it is tried again; it doubles each time. A full disk is no less full for being asked more."""

_Result = TypeVar("_Result")


class BusOutages:
    """Of one job. `say` tells people, in its record and events, what it waits for."""

    def __init__(self, job: str, say: Callable[[str], Awaitable[None]]) -> None:
        self._job = job
        self._say = say

    async def outlast(self, what: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Does `work`, which is `what` in a few words, until nothing is missing for it.

        Raises:
            DmscError: whatever else `work` raises.
        """
        pause_s, reason = AGAIN_S, ""
        saying: asyncio.Task[None] | None = None

        async def say() -> None:
            await asyncio.sleep(QUIET_S)
            await self._say(f"waits for the bus, {what}: {reason}")

        try:
            while True:
                try:
                    return await work()
                except Unavailable as error:
                    log.warning("tried again", job=self._job, what=what, reason=error.text)
                    reason = error.text
                saying = saying or asyncio.create_task(say())  # beside: that, too, may wait for the bus
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, AGAIN_MOST_S)
        finally:
            if saying is not None:
                saying.cancel()
                await asyncio.gather(saying, return_exceptions=True)
