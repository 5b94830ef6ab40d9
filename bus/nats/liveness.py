"""Time in which the bus was heard: whoever judges others by their silence measures it by this clock.

A server that stands still (stopped, out of memory, its disk hanging) keeps its connections open and says
nothing: everybody is silent then, and nobody is dead. So a judge sends a message of its own through the
server, again and again, and time counts only as far as these came back (ADR-0036). A pulse takes the way that
others' messages take, behind all that the judge has sent, and comes back behind all that it was sent before.
Where the bus has several servers, one of them may stand still alone: so it is sent by way of each
(`bus.nats.server_probes`), and time counts while all of them return it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from bus.logs import get_logger
from bus.nats.server_probes import ServerProbes
from schemas.errors import DmscError

if TYPE_CHECKING:
    from bus.nats.client import NatsConnection

log = get_logger("bus.nats.liveness")

BEAT_S = 0.25
"""Pause between the return of one pulse and the next one: some ten bytes each way."""
GAP_S = 1.0
"""From one return to the next at most so much counts as heard. Larger: a standstill is half believed before
it is noticed; smaller: a server under load looks like one that stands still."""


OWN = ""
"""The server that the judge is connected to, whichever it is."""


class HeardTime:
    """Seconds in which the bus was heard. Pure: `now` is of any monotonic clock.

    Where pulses come back from all servers it goes like that clock. Where one doesn't, it stops after
    `GAP_S`, and a long silence that ends counts as `GAP_S`, too: messages from it may be on their way only
    now. A server counts from its first return until it has `left`; the judge's own always does.
    """

    def __init__(self, now: float) -> None:
        self._heard = 0.0
        self._until = now  # what is in `_heard`
        self._returned = {OWN: now}

    def resume(self, now: float) -> None:
        """Nobody listened until now: that time is left out."""
        self._until = now
        self._returned = dict.fromkeys(self._returned, now)

    def returned(self, now: float, server: str = OWN) -> None:
        """A pulse came back by way of this server."""
        self._settle(now)
        self._returned[server] = now

    def left(self, now: float, server: str) -> None:
        """Nobody waits for this server until it returns a pulse again."""
        self._settle(now)
        self._returned.pop(server, None)

    def at(self, now: float) -> float:
        return self._heard + max(0.0, min(now, self._stands_at()) - self._until)

    def silent(self, now: float) -> float:
        """Seconds by which the clock stands now; 0 while it goes."""
        return max(0.0, now - self._stands_at())

    @property
    def servers(self) -> int:
        """How many count, apart from the judge's own connection."""
        return len(self._returned) - 1

    def _settle(self, now: float) -> None:
        self._heard, self._until = self.at(now), now

    def _stands_at(self) -> float:
        return min(self._returned.values()) + GAP_S


class BusLiveness:
    """The pulse of one connection: beats while somebody holds it."""

    def __init__(self, link: NatsConnection, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._time = HeardTime(clock())
        self._holders = 0
        self._beating: asyncio.Task[None] | None = None
        self._echoes: ServerProbes | None = None

    def attend(self) -> None:
        """Looks out for the servers of a cluster from now on. Who judges others calls it at its start: one
        that stands still already can't be told from one that is not there.

        All others wait for their own server alone: a connection of each instance to each would be too much.
        """
        if self._echoes is None:
            self._echoes = ServerProbes(self._link, self, BEAT_S, self._clock)
            self._link.spawn(self._echoes.run(), "echoes of servers")

    def now(self) -> float:
        """Seconds of heard time; they count while it is held."""
        return self._time.at(self._clock())

    @property
    def silent_s(self) -> float:
        """For how long the bus has not been heard; 0: it is."""
        return self._time.silent(self._clock())

    @property
    def servers(self) -> int:
        """Of a cluster, how many the clock waits for; 0 where there is one alone."""
        return self._time.servers

    @contextlib.contextmanager
    def held(self) -> Iterator[BusLiveness]:
        """It beats, and its clock goes, until the end of the block; holders share it."""
        if not self._holders:
            self._time.resume(self._clock())
            if self._echoes is not None:
                self._echoes.hurry.set()
            self._beating = self._link.spawn(self._beat(), "pulse")
        self._holders += 1
        try:
            yield self
        finally:
            self._holders -= 1
            if not self._holders and self._beating is not None:
                self._beating.cancel()
                self._beating = None
                if self._echoes is not None:
                    self._echoes.hurry.clear()

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
                self.returned(OWN)
            except DmscError:
                if self._link.closing:
                    return
            await asyncio.sleep(BEAT_S)

    # --- what is heard ---------------------------------------------------------------------------------

    def returned(self, server: str) -> None:
        """A pulse came back by way of this server."""
        stood = self.silent_s
        self._time.returned(self._clock(), server)
        self._tell(stood)

    def left(self, server: str) -> None:
        """Nobody waits for this server any more."""
        stood = self.silent_s
        self._time.left(self._clock(), server)
        self._tell(stood)

    def _tell(self, stood_s: float) -> None:
        if self._holders and stood_s and not self.silent_s:
            log.warning("the bus stood still; nobody is judged by that time", silent_s=round(stood_s, 1))
