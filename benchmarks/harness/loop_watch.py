"""For how long the loop of an asyncio service is held."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator


class LoopWatch:
    """How long its loop did not come round to it, at most, in seconds.

    Attributes:
        longest_s: by the clock.
        own_s: of the processor, by all threads of this process meanwhile: without what the rest of a busy
            machine took.
        computed_s: of that, by the loop's own thread.
    """

    def __init__(self) -> None:
        self.longest_s = self.own_s = self.computed_s = 0.0

    async def look(self, pause_s: float = 0.0) -> None:
        """Looks at the clocks, until cancelled. `pause_s`: between two looks; it does not count."""
        while True:
            before, own, computed = time.perf_counter(), time.process_time(), time.thread_time()
            await asyncio.sleep(pause_s)
            self.longest_s = max(self.longest_s, time.perf_counter() - before - pause_s)
            self.own_s = max(self.own_s, time.process_time() - own)
            self.computed_s = max(self.computed_s, time.thread_time() - computed)


@contextlib.asynccontextmanager
async def watched_loop(pause_s: float = 0.001) -> AsyncIterator[LoopWatch]:
    """Watches the running loop. Each look takes some microseconds, so a pause leaves the loop to others."""
    watch = LoopWatch()
    looking = asyncio.create_task(watch.look(pause_s))
    await asyncio.sleep(0)
    try:
        yield watch
        await asyncio.sleep(2 * pause_s)  # what held the loop until now counts, too
    finally:
        looking.cancel()
