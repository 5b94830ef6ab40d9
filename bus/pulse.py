"""Time in which the bus was heard: whoever judges others by their silence measures it by this clock.

A server that stands still (stopped, out of memory, its disk hanging) keeps its connections open and says
nothing: everybody is silent then, and nobody is dead. So a judge sends a message of its own through the
server, again and again, and time counts only as far as these came back (ADR-0036). A pulse takes the way that
others' messages take, behind all that the judge has sent, and comes back behind all that it was sent before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from bus.logs import get_logger
from schemas.errors import DmscError

if TYPE_CHECKING:
    from bus.link import Link

log = get_logger("bus.pulse")

BEAT_S = 0.25
"""Pause between the return of one pulse and the next one: some ten bytes each way."""
GAP_S = 1.0
"""From one return to the next at most so much counts as heard. Larger: a standstill is half believed before
it is noticed; smaller: a server under load looks like one that stands still."""


class HeardTime:
    """Seconds in which the bus was heard. Pure: `now` is of any monotonic clock.

    Where pulses come back it goes like that clock. Where they don't, it stops after `GAP_S`, and a long
    silence that ends counts as `GAP_S`, too: messages from it may be on their way only now.
    """

    def __init__(self, now: float) -> None:
        self._heard = 0.0
        self._since = now

    def resume(self, now: float) -> None:
        """Nobody listened until now: that time is left out."""
        self._since = now

    def returned(self, now: float) -> None:
        """A pulse came back."""
        self._heard, self._since = self.at(now), now

    def at(self, now: float) -> float:
        return self._heard + min(now - self._since, GAP_S)

    def silent(self, now: float) -> float:
        """Seconds by which the clock stands now; 0 while it goes."""
        return max(0.0, now - self._since - GAP_S)


class Pulse:
    """The pulse of one connection: beats while somebody holds it."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._time = HeardTime(clock())
        self._holders = 0
        self._beating: asyncio.Task[None] | None = None

    def now(self) -> float:
        """Seconds of heard time; they count while it is held."""
        return self._time.at(self._clock())

    @property
    def silent_s(self) -> float:
        """For how long the bus has not been heard; 0: it is."""
        return self._time.silent(self._clock())

    @contextlib.contextmanager
    def held(self) -> Iterator[Pulse]:
        """It beats, and its clock goes, until the end of the block; holders share it."""
        if not self._holders:
            self._time.resume(self._clock())
            self._beating = self._link.spawn(self._beat(), "pulse")
        self._holders += 1
        try:
            yield self
        finally:
            self._holders -= 1
            if not self._holders and self._beating is not None:
                self._beating.cancel()
                self._beating = None

    @contextlib.asynccontextmanager
    async def timeout(self, delay_s: float) -> AsyncIterator[None]:
        """As `asyncio.timeout`, in heard time: `TimeoutError` once so much of it has passed."""
        with self.held():
            loop, ends = asyncio.get_running_loop(), self.now() + delay_s
            async with asyncio.timeout(None) as scope:
                timer = loop.call_soon(lambda: None)

                def look() -> None:
                    nonlocal timer
                    left = ends - self.now()
                    if left > 0:
                        timer = loop.call_later(max(left, BEAT_S) if self.silent_s else left, look)
                    else:
                        scope.reschedule(loop.time())

                look()
                try:
                    yield
                finally:
                    timer.cancel()

    async def _beat(self) -> None:
        while True:
            try:
                await self._link.wait_online()
                await self._link.barrier(timeout_s=None)
                stood = self.silent_s
                self._time.returned(self._clock())
                if stood:
                    log.warning(
                        "the bus stood still; nobody is judged by that time", silent_s=round(stood, 1)
                    )
            except DmscError:
                if self._link.closing:
                    return
            await asyncio.sleep(BEAT_S)
