"""Bus operations of a job outside its steps: each is repeated while the bus is unavailable.

A bus server that is away or does not respond, a full disk, a registry that can't write: none of these is the
job's fault, and none ends it. Errors about the job itself are raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from bus.logs import get_logger
from bus.tasks import cancel
from schemas.errors import Unavailable

log = get_logger("orchestrator")

QUIET_S = 20.0
"""After this time a job says what it waits for."""
AGAIN_S, AGAIN_MOST_S = 0.2, 5.0
"""Pause before an operation is tried again; it doubles each time, up to the second value."""

_Result = TypeVar("_Result")


class BusOutages:
    """Outlasts outages of the bus for one job. `say` writes what it waits for into its record and events."""

    def __init__(self, job: str, say: Callable[[str], Awaitable[None]]) -> None:
        self._job = job
        self._say = say

    async def outlast(self, what: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Repeats `work` while it raises `Unavailable`; returns its result.

        Args:
            what: the work in a few words.
            work: makes one attempt.

        Raises:
            DmscError: any other error of `work`.
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
                saying = saying or asyncio.create_task(say())  # a task: it may have to wait for the bus, too
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, AGAIN_MOST_S)
        finally:
            await cancel(saying)
