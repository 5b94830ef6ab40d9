"""Whether the records of a step are there, for a job that takes those of a feed as they arrive (ADR-0064).

A step begins only once all its records are at the bus. So a job that waits, for hours or days, waits between
two steps: no deadline of a step runs, no instance is silent, and whatever is done at a boundary is done.
"""

from __future__ import annotations

import asyncio
import math
import time

from bus.files.feed_rows import FeedRows
from entities.orchestrator.job_state.context import JobContext
from schemas.errors import BadData, Unavailable
from schemas.feeds import Standing, records_needed, standing


class Arrivals:
    """The records of one job's steps. Of a job without an arriving feed all are there.

    Args:
        job: The job.
        again_s: Pause before the bus is asked again, which is away.
        told_after_s: A shorter wait is not told.
        told_every_s: Seconds between two changes of what the job's record says of a wait.
    """

    def __init__(
        self, job: JobContext, *, again_s: float = 0.5, told_after_s: float = 1.0, told_every_s: float = 1.0
    ) -> None:
        self._job = job
        self._again_s = again_s
        self._told_after_s = told_after_s
        self._told_every_s = told_every_s
        self._rows: FeedRows | None = None
        self._woken = asyncio.Event()
        self._told = ""

    async def close(self) -> None:
        """Ends the watch. Twice is fine."""
        if self._rows is not None:
            await self._rows.close()

    def wake(self) -> None:
        """There is something else to do at the boundary."""
        self._woken.set()

    @property
    def feed(self) -> str:
        """The feed's name; empty: the job takes none as it arrives."""
        return self._job.spec.data.arriving or ""

    def there(self, step: int) -> bool:
        """Whether all records of a step are known to be there."""
        return not self.feed or (self._rows is not None and self._standing(step) == "there")

    async def standing(self, step: int) -> Standing:
        """Whether the records of a step are there, as of now.

        Raises:
            BadData: The feed was deleted, is damaged, or was closed without the records of one step.
        """
        if not self.feed:
            return "there"
        rows = await self._opened()
        if rows.broken:
            raise BadData(f"data.feed: {rows.broken}, and the job needs its records")
        found = self._standing(step)
        if found == "over" and not step:
            raise BadData(
                f"data.feed: {self.feed} was closed with {rows.count:,} records, fewer than the "
                f"{self._behind(0):,} of one step; lower training.microbatches, or push more to another feed"
            )
        return found

    async def until_news(self, step: int, within_s: float | None = None) -> bool:
        """Returns once the records of a step are there, never will be, or there is something else to do.

        Meanwhile the job's record says what it waits for.

        Args:
            step: The step.
            within_s: The longest wait, s; None: any.

        Returns:
            Whether that is so; False: `within_s` is over, and it still waits.
        """
        rows = await self._opened()
        self._woken.clear()
        began = time.monotonic()
        ends_at, tells_at = began + (math.inf if within_s is None else within_s), began + self._told_after_s
        while self._standing(step) == "waits" and not rows.broken and not self._woken.is_set():
            needed = records_needed(self._behind(step), self._job.spec.data.shuffle_window)
            text = f"waits for records of feed {self.feed} (has {rows.count:,}, needs {needed:,})"
            now = time.monotonic()
            if now >= ends_at:
                return False
            if text != self._told and now >= tells_at:
                if self._told:
                    await self._job.store.note(now=True, reason=text)
                else:
                    await self._job.store.reason(text)
                self._told, tells_at = text, time.monotonic() + self._told_every_s
                continue
            looks_at = min(ends_at, math.inf if text == self._told else tells_at)
            await self._next(rows, None if looks_at == math.inf else looks_at - now)
        if self._told:
            await self._job.store.reason(f"goes on from step {step}")
            self._told = ""
        return True

    async def _next(self, rows: FeedRows, pause_s: float | None) -> None:
        waits = {asyncio.ensure_future(rows.until_news()), asyncio.ensure_future(self._woken.wait())}
        try:
            await asyncio.wait(waits, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _standing(self, step: int) -> Standing:
        assert self._rows is not None
        window, stops = self._job.spec.data.shuffle_window, self._job.spec.ends_with_feed
        return standing(self._behind(step), window, self._rows.count, closed=self._rows.closed, stops=stops)

    def _behind(self, step: int) -> int:
        """The position behind the last sample of a step."""
        training = self._job.spec.training
        return (step + 1) * training.microbatches * training.microbatch_samples

    async def _opened(self) -> FeedRows:
        while self._rows is None:
            uid = next((each.feed for each in self._job.instances.graph.sources if each.feed), "")
            if not uid:
                raise BadData(f"data.feed: the job's graph does not say which feed {self.feed} was")
            try:
                self._rows = await FeedRows(self._job.bus, self.feed, uid).__aenter__()
            except Unavailable:
                await asyncio.sleep(self._again_s)
        return self._rows
