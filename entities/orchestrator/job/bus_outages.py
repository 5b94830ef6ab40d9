"""Bus operations of a job outside its steps: each is repeated while the bus is unavailable.

A bus server that is away or does not respond, a full disk, a registry that can't write: none of these is the
job's fault, and none ends it. Errors about the job itself are raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from bus.logs import get_logger
from bus.tasks import cancel
from schemas.errors import Unavailable

log = get_logger("orchestrator")


_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class OutageTimes:
    """How a job waits for the bus, in seconds."""

    quiet_s: float = 20.0
    """After this time the job says what it waits for."""
    pause_s: float = 0.2
    """First pause before an operation is tried again; it doubles each time."""
    pause_most_s: float = 5.0


class BusOutages:
    """Outlasts outages of the bus for one job. `say` writes what it waits for into its record and events."""

    def __init__(
        self, job: str, say: Callable[[str], Awaitable[None]], times: OutageTimes = OutageTimes()
    ) -> None:
        self._job = job
        self._say = say
        self._times = times

    async def outlast(self, what: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Repeats `work` while it raises `Unavailable`; returns its result.

        Args:
            what: the work in a few words.
            work: makes one attempt.

        Raises:
            DmscError: any other error of `work`.
        """
        pause_s, reason = self._times.pause_s, ""
        saying: asyncio.Task[None] | None = None

        async def say() -> None:
            await asyncio.sleep(self._times.quiet_s)
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
                pause_s = min(2 * pause_s, self._times.pause_most_s)
        finally:
            await cancel(saying)
