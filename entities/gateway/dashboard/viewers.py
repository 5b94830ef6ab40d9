"""Bounded queues of frames, one per viewer; a frame is made once and queued by reference. No bus.

Overflow: a viewer that lags `QUEUED` frames behind loses all of them, and gets the whole view instead as soon
as it reads again. Nothing ever waits for a viewer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

QUEUED = 8
"""Frames that may wait for one viewer: two seconds' worth."""


class Viewer:
    """One connected browser."""

    def __init__(self, whole: Callable[[], bytes]) -> None:
        self._whole = whole
        self._frames: deque[bytes] = deque()
        self._behind = True  # the first frame is the whole view
        self._news = asyncio.Event()
        self._news.set()
        self.overflows = 0

    def offer(self, frame: bytes) -> None:
        """Queues a frame; drops all frames if the queue is full."""
        if self._behind:
            return  # the whole view, which comes next, contains it
        if len(self._frames) >= QUEUED:
            self._frames.clear()
            self._behind = True
            self.overflows += 1
        else:
            self._frames.append(frame)
        self._news.set()

    def renew(self) -> None:
        """Has the viewer get the whole view next: it says more of the past than before."""
        self._frames.clear()
        self._behind = True
        self._news.set()

    async def next(self, timeout_s: float) -> bytes | None:
        """The next frame, or None after `timeout_s` without one."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return None
        if self._behind:
            self._behind = False
            self._frames.clear()
            self._news.clear()
            return self._whole()
        frame = self._frames.popleft()
        if not self._frames:
            self._news.clear()
        return frame
