"""How much a gateway's HTTP door has to do, and when that is too much.

Requests are begun some at a time, so that the loop comes round in milliseconds however many have come; the
others wait for their turn. What is too much shows in how long the first of them has waited: a burst may wait
for a while, a queue that stands may not (as in Nichols and Jacobson, "Controlling queue delay", ACM Queue
2012, and Maurer, "Fail at scale", ACM Queue 2015). Then whoever comes is refused at once, and who waits is
served soon.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from bus.logs import get_logger
from entities.gateway.http.config import HttpConfig
from entities.metrics import HTTP_OPEN, HTTP_REFUSED, MetricReading

log = get_logger("door")

TURN = 8
"""Requests that are begun while the loop comes round once."""
CALM_S = 0.05
"""Without anybody waiting; less is a gap in a queue that stands."""
STANDING_SHARE = 8
"""A queue that stands may have this part of a burst's length: of those who come at once, the first one's wait
says nothing yet."""
TOLD_S = 1.0
"""Between two lines about refusals that have no line of their own."""


@dataclass(slots=True)
class AdmissionQueue:
    """When the requests came that wait for their turn: pure, times are monotonic seconds."""

    most: int
    burst_s: float
    standing_s: float
    came: deque[float] = field(default_factory=deque)
    unread: int = 0  # came in this turn of the loop, and have not begun to wait yet
    since: float = 0.0  # when it began to stand
    left_at: float = float("-inf")  # when somebody's turn came last

    def join(self, now: float) -> None:
        if not self.came and now - self.left_at > CALM_S:
            self.since = now
        self.came.append(now)

    def leave(self, now: float) -> None:
        """The first one's turn has come."""
        self.came.popleft()
        self.left_at = now

    def is_too_long(self, now: float) -> bool:
        """Whether one more is to be refused."""
        waiting = len(self.came) + self.unread
        if waiting >= self.most:
            return True
        if not self.came:
            return False
        if now - self.since <= self.burst_s:
            return now - self.came[0] > self.burst_s
        return waiting >= self.most // STANDING_SHARE or now - self.came[0] > self.standing_s


class HttpLoad:
    """What the door is busy with."""

    def __init__(self, config: HttpConfig | None = None) -> None:
        config = config or HttpConfig()
        self.open = 0
        self.stalled: Counter[str] = Counter()
        """Of these, by identity, such as wait for the client's next bytes: they keep nobody else out."""
        self.draining = False
        self.refused: Counter[str] = Counter()
        self.queue = AdmissionQueue(config.queued_requests, config.burst_s, config.standing_s)
        self._most_open = config.open_requests
        self._turns: deque[asyncio.Future[None]] = deque()
        self._begun = 0
        self._idle = asyncio.Event()
        self._untold = 0
        self._told_at = float("-inf")

    # --- who may begin -----------------------------------------------------------------------------------
    def too_much(self, now: float) -> str:
        """Why one more request is to be refused; empty where it is not. Loop time."""
        if self.open - self.stalled.total() >= self._most_open:
            return "open"
        return "queue" if self.queue.is_too_long(now) else ""

    def comes(self) -> None:
        """A request was read; its task has yet to run, in the loop's next turn."""
        if not self.queue.unread:
            asyncio.get_running_loop().call_soon(self._all_joined)
        self.queue.unread += 1

    def _all_joined(self) -> None:
        self.queue.unread = 0

    async def turn(self) -> None:
        """Until this request may begin."""
        loop = asyncio.get_running_loop()
        if self._begun < TURN and not self._turns:
            self._begin(loop)
            return
        mine: asyncio.Future[None] = loop.create_future()
        self._turns.append(mine)
        self.queue.join(loop.time())
        await mine

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._begun:
            loop.call_soon(self._next)
        self._begun += 1

    def _next(self) -> None:
        """The loop has come round."""
        self._begun = 0
        loop = asyncio.get_running_loop()
        while self._turns and self._begun < TURN:
            first = self._turns.popleft()
            self.queue.leave(loop.time())
            if not first.done():  # cancelled, if so
                self._begin(loop)
                first.set_result(None)

    def refuse_unread(self, reason: str, now: float) -> None:
        """Counts a request that was refused before anything of it was looked at."""
        self.refused[reason] += 1
        self._untold += 1
        if now - self._told_at >= TOLD_S:
            log.warning("more requests than this gateway can do", refused=self._untold)
            self._untold, self._told_at = 0, now

    # --- what is being answered --------------------------------------------------------------------------
    def enter(self) -> None:
        self.open += 1
        self._idle.clear()

    def leave(self) -> None:
        self.open -= 1
        if not self.open:
            self._idle.set()

    async def drained(self, timeout_s: float) -> None:
        """Until nothing is being answered, or `timeout_s` has passed."""
        if self.open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()

    def readings(self, gateway: str) -> Iterator[MetricReading]:
        """For whoever scrapes this process."""
        yield HTTP_OPEN(self.open, gateway=gateway)
        for reason, count in self.refused.items():
            yield HTTP_REFUSED(count, gateway=gateway, reason=reason)
