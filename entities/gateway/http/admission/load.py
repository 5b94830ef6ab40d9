"""The load of the HTTP API: requests that are open, requests that wait, and when one more is refused.

Only a few requests begin in each turn of the event loop, so that a turn takes milliseconds however many have
come; the others queue. Overload shows in how long the first of the queue has waited: a burst may wait for a
while, a standing queue may not (as in Nichols and Jacobson, "Controlling queue delay", ACM Queue 2012, and
Maurer, "Fail at scale", ACM Queue 2015). Under overload, new requests are refused at once, and the waiting
ones are served soon.
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
from schemas.errors import Overloaded, RateLimited

log = get_logger("door")

TURN = 8
"""Requests that begin in one turn of the event loop."""
STANDING_SHARE = 8
"""A standing queue may have 1/8 of a burst's length: of many that come at once, the first one's wait says
nothing yet."""


@dataclass(slots=True)
class AdmissionQueue:
    """The arrival times of the waiting requests, and the rule of when that is too many.

    Pure; times are monotonic seconds.
    """

    most: int
    burst_s: float
    standing_s: float
    calm_s: float = 0.05  # a gap that is shorter leaves it a standing queue
    came: deque[float] = field(default_factory=deque)
    since: float = 0.0  # since when the queue has not been empty
    left_at: float = float("-inf")  # when a request last left the queue
    unread: int = 0  # requests that came in this turn of the loop and do not wait yet

    def join(self, now: float) -> None:
        if not self.came and now - self.left_at > self.calm_s:
            self.since = now
        self.came.append(now)

    def leave(self, now: float) -> None:
        """The first request leaves the queue."""
        self.came.popleft()
        self.left_at = now

    def is_too_long(self, now: float) -> bool:
        """Whether one more request is to be refused."""
        waiting = len(self.came) + self.unread
        if waiting >= self.most:
            return True
        if not self.came:
            return False
        if now - self.since <= self.burst_s:
            return now - self.came[0] > self.burst_s
        return waiting >= self.most // STANDING_SHARE or now - self.came[0] > self.standing_s


class HttpLoad:
    """Open and waiting requests of one HTTP API, with their limits and counters."""

    def __init__(self, config: HttpConfig | None = None) -> None:
        config = config or HttpConfig()
        self.open = 0
        self.stalled: Counter[str] = Counter()
        """Open requests that wait for the client's next bytes, by identity; they do not count as open."""
        self.asking = 0
        """Requests that wait for a service's answer; they do not count as open."""
        self.draining = False
        self.refused: Counter[str] = Counter()
        self.queue = AdmissionQueue(config.queued_requests, config.burst_s, config.standing_s)
        self._most_open = config.open_requests
        self._config = config
        self._bodies: Counter[str] = Counter()  # bytes in memory, by identity
        self._downloads: Counter[str] = Counter()
        self._turns: deque[asyncio.Future[None]] = deque()
        self._begun = 0
        self._log_every_s = config.shed_log_every_s
        self._unlogged = 0
        self._logged_at = float("-inf")
        self._idle = asyncio.Event()

    # --- which requests may begin ------------------------------------------------------------------------
    def too_much(self, now: float) -> str:
        """Why one more request is to be refused; empty if it is not. `now`: loop time, in seconds."""
        if self.open - self.stalled.total() >= self._most_open:
            return "open"
        return "queue" if self.queue.is_too_long(now) else ""

    def comes(self) -> None:
        """Counts a request that was read, and whose task runs in the loop's next turn."""
        if not self.queue.unread:
            asyncio.get_running_loop().call_soon(self._all_joined)
        self.queue.unread += 1

    def _all_joined(self) -> None:
        self.queue.unread = 0

    async def turn(self) -> None:
        """Waits until this request may begin."""
        loop = asyncio.get_running_loop()
        if self._begun < TURN and not self._turns:
            self._begin(loop)
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._turns.append(turn)
        self.queue.join(loop.time())
        await turn

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._begun:
            loop.call_soon(self._next)
        self._begun += 1

    def _next(self) -> None:
        """Begins the next requests, in a new turn of the loop."""
        self._begun = 0
        loop = asyncio.get_running_loop()
        while self._turns and self._begun < TURN:
            first = self._turns.popleft()
            self.queue.leave(loop.time())
            if not first.done():  # a done one was cancelled
                self._begin(loop)
                first.set_result(None)

    def shed(self, reason: str, now: float) -> None:
        """Counts a request that was refused under overload, and logs the number from time to time."""
        self.refused[reason] += 1
        self._unlogged += 1
        if now - self._logged_at >= self._log_every_s:
            log.warning("more requests than this gateway can do", refused=self._unlogged)
            self._unlogged, self._logged_at = 0, now

    # --- open requests -----------------------------------------------------------------------------------
    def enter(self) -> None:
        self.open += 1
        self._idle.clear()

    def leave(self) -> None:
        self.open -= 1
        self._note_idle()

    @contextlib.contextmanager
    def asks(self) -> Iterator[None]:
        """Counts a request as one that waits for a service, for the length of the block."""
        self.asking += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.asking -= 1
            self._note_idle()

    def _note_idle(self) -> None:
        if not self.open and not self.asking:
            self._idle.set()

    async def drained(self, timeout_s: float) -> None:
        """Waits until no request is open or waits for a service, or `timeout_s` has passed."""
        if self.open or self.asking:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()

    # --- what one identity may hold ----------------------------------------------------------------------
    def keep(self, identity: str, size: int) -> None:
        """Counts `size` more bytes of bodies in memory.

        Raises:
            RateLimited: the identity's requests have as many as they may.
            Overloaded: all requests have.
        """
        config = self._config
        if self._bodies[identity] + size > config.body_bytes_each:
            text = f"your requests under way have more than {config.body_bytes_each} bytes; wait for one"
            raise RateLimited(text, retry_after_s=1.0)
        if self._bodies.total() + size > config.body_bytes:
            text = "the requests under way here are too large together; try another gateway"
            raise Overloaded(text, retry_after_s=1.0)
        self._bodies[identity] += size

    def drop(self, identity: str, size: int) -> None:
        self._bodies[identity] -= size
        if self._bodies[identity] <= 0:
            del self._bodies[identity]

    @contextlib.contextmanager
    def downloads(self, identity: str) -> Iterator[None]:
        """Counts one more file that this identity reads, for the length of the block.

        Raises `RateLimited`.
        """
        if self._downloads[identity] >= self._config.downloads_each:
            text = f"you read {self._config.downloads_each} files at this moment; wait for one"
            raise RateLimited(text, retry_after_s=1.0)
        self._downloads[identity] += 1
        try:
            yield
        finally:
            self._downloads[identity] -= 1
            if not self._downloads[identity]:
                del self._downloads[identity]

    def readings(self, gateway: str) -> Iterator[MetricReading]:
        """The load's metrics, for the process's exposition."""
        yield HTTP_OPEN(self.open, gateway=gateway)
        for reason, count in self.refused.items():
            yield HTTP_REFUSED(count, gateway=gateway, reason=reason)
