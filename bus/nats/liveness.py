"""Heard time: a clock that stops while the bus is silent, for services that judge others by their silence.

A server that stands still (stopped, out of memory, its disk hanging) keeps its connections open and sends
nothing. Everybody is silent then, but nobody is dead. So a judging service sends a message of its own through
the server again and again, and time counts only as far as these pulses came back (ADR-0036). A pulse queues
behind everything that the judge has sent, and comes back behind everything that was sent to the judge before.
If the bus has several servers, one of them alone may stand still. So a pulse is sent through each server
(`bus.nats.server_probes`), and time counts while all of them return it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from bus.logs import get_logger
from bus.nats.dialer import ConnectionTimes
from bus.nats.server_probes import ServerProbes
from schemas.errors import DmscError

if TYPE_CHECKING:
    from bus.nats.client import NatsConnection

log = get_logger("bus.nats.liveness")

OWN = ""
"""Stands for the server to which the judge is connected, whichever it is."""


class HeardTime:
    """Seconds in which the bus was heard. Pure: `now` comes from any monotonic clock.

    While pulses come back from all servers, heard time runs like that clock. If one server's pulse stays
    away, heard time stops after `gap_s`. A long silence that ends also counts as `gap_s` only, because
    messages from that server may be on their way only now. A server counts from its first return until
    `left`; the judge's own server always counts.
    """

    def __init__(self, now: float, gap_s: float = ConnectionTimes.gap_s) -> None:
        self._gap_s = gap_s
        self._heard = 0.0
        self._until = now  # the time up to which `_heard` is complete
        self._returned = {OWN: now}

    def resume(self, now: float) -> None:
        """Skips the time until now, in which no pulse was sent."""
        self._until = now
        self._returned = dict.fromkeys(self._returned, now)

    def returned(self, now: float, server: str = OWN) -> None:
        """Notes that a pulse came back through this server."""
        self._settle(now)
        self._returned[server] = now

    def left(self, now: float, server: str) -> None:
        """Stops waiting for this server until it returns a pulse again."""
        self._settle(now)
        self._returned.pop(server, None)

    def at(self, now: float) -> float:
        """Heard time at `now`, in seconds."""
        return self._heard + max(0.0, min(now, self._stops_at()) - self._until)

    def silent(self, now: float) -> float:
        """For how many seconds heard time has stood still; 0 while it runs."""
        return max(0.0, now - self._stops_at())

    @property
    def servers(self) -> int:
        """The number of servers that count, without the judge's own connection."""
        return len(self._returned) - 1

    def _settle(self, now: float) -> None:
        self._heard, self._until = self.at(now), now

    def _stops_at(self) -> float:
        return min(self._returned.values()) + self._gap_s


class BusLiveness:
    """The pulse of one connection; it beats while somebody holds it (`held`)."""

    def __init__(self, connection: NatsConnection, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self._clock = clock
        self._beat_s = connection.times.beat_s
        self._time = HeardTime(clock(), connection.times.gap_s)
        self._holders = 0
        self._beat_task: asyncio.Task[None] | None = None
        self._probes: ServerProbes | None = None

    def attend(self) -> None:
        """Starts to probe every server of a cluster.

        A service that judges others calls this at its start, because a server that already stands still can't
        be told from one that does not exist. All other services probe their own server only: a connection
        from each instance to each server would be too many.
        """
        if self._probes is None:
            self._probes = ServerProbes(self._connection, self, self._clock)
            self._connection.spawn(self._probes.run(), "echoes of servers")

    def now(self) -> float:
        """Heard time in seconds; it runs while the pulse is held."""
        return self._time.at(self._clock())

    @property
    def silent_s(self) -> float:
        """For how many seconds the bus has not been heard; 0 while it is heard."""
        return self._time.silent(self._clock())

    @property
    def servers(self) -> int:
        """The number of a cluster's servers that the clock waits for; 0 if there is only one server."""
        return self._time.servers

    @contextlib.contextmanager
    def held(self) -> Iterator[BusLiveness]:
        """Keeps the pulse beating and heard time running until the end of the block; holders share both."""
        if not self._holders:
            self._time.resume(self._clock())
            if self._probes is not None:
                self._probes.hurry.set()
            self._beat_task = self._connection.spawn(self._beat(), "pulse")
        self._holders += 1
        try:
            yield self
        finally:
            self._holders -= 1
            if not self._holders and self._beat_task is not None:
                self._beat_task.cancel()
                self._beat_task = None
                if self._probes is not None:
                    self._probes.hurry.clear()

    @contextlib.asynccontextmanager
    async def timeout(self, delay_s: float) -> AsyncIterator[None]:
        """Like `asyncio.timeout`, in heard time: raises `TimeoutError` after `delay_s` heard seconds."""
        with self.held():
            loop, ends = asyncio.get_running_loop(), self.now() + delay_s
            async with asyncio.timeout(None) as scope:
                timer = loop.call_soon(lambda: None)

                def check() -> None:
                    nonlocal timer
                    left_s = ends - self.now()
                    if left_s > 0:
                        timer = loop.call_later(max(left_s, self._beat_s) if self.silent_s else left_s, check)
                    else:
                        scope.reschedule(loop.time())

                check()
                try:
                    yield
                finally:
                    timer.cancel()

    async def _beat(self) -> None:
        while True:
            try:
                await self._connection.wait_online()
                await self._connection.barrier(timeout_s=None, repeat_s=self._connection.times.echo_repeat_s)
                self.returned(OWN)
            except DmscError:
                if self._connection.closing:
                    return
            await asyncio.sleep(self._beat_s)

    # --- reports of the probes -------------------------------------------------------------------------

    def returned(self, server: str) -> None:
        """Notes that a pulse came back through this server."""
        silent_s = self.silent_s
        self._time.returned(self._clock(), server)
        self._log_if_resumed(silent_s)

    def left(self, server: str) -> None:
        """Stops waiting for this server."""
        silent_s = self.silent_s
        self._time.left(self._clock(), server)
        self._log_if_resumed(silent_s)

    def _log_if_resumed(self, silence_s: float) -> None:
        if self._holders and silence_s and not self.silent_s:
            log.warning("the bus stood still; nobody is judged by that time", silent_s=round(silence_s, 1))
