"""Which servers of a cluster carry what is said: a message goes to each of them and comes back.

Whom a judge listens to may be connected to another server than the judge is, and that one may stand still
alone. So the judge has a connection of its own to each server: what it says on its main one goes to that
server, is said again there, and comes back. That is the way of its orders to whoever is connected there, and
of their answers and heartbeats to it. The connection shows the judge's own identity, and says nothing but
to itself (`bus.guard.permissions`, `self._`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from bus.logs import get_logger
from bus.nats import dialer as dial
from bus.nats import reply_subjects as inboxes
from bus.nats.dialer import Dialer, Listener
from schemas.errors import DmscError

if TYPE_CHECKING:
    from bus.nats.client import NatsConnection

log = get_logger("bus.nats.liveness")

REPEAT_S = 1.0
"""An echo is asked for again after this: what was on its way between servers is lost with their route."""
IDLE_S = 5.0
"""Pause between echoes while nobody measures time."""
SILENT_MOST_S = 4.5 * dial.PING_INTERVAL_S
"""A server that is silent for longer holds no clock. Clients leave a hanging one after three pings and dial
another one; smaller: they are judged before that."""
LOOK_S = 1.0
"""How often new servers are looked for, and pause before one that is not there is dialled again."""
DIAL_S = 5.0


class EchoListener(Protocol):
    """Who is told of echoes."""

    def returned(self, server: str) -> None:
        """What was said came back by way of this server."""

    def left(self, server: str) -> None:
        """It is closed, or silent for too long: nobody waits for it."""


class ServerProbes:
    """Of all servers that one connection knows, unless it knows but one."""

    def __init__(
        self, link: NatsConnection, heard: EchoListener, beat_s: float, clock: Callable[[], float]
    ) -> None:
        self.hurry = asyncio.Event()
        """Set while time is measured: then an echo follows the other after `beat_s`."""
        self._link = link
        self._heard = heard
        self._beat_s = beat_s
        self._clock = clock
        self._keeping: dict[str, asyncio.Task[None]] = {}  # by address
        self._ends: dict[str, asyncio.Future[None]] = {}  # of the connection to a server, by the server's id

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for place, dialer in self._link.cluster().items():
                if place not in self._keeping:
                    self._keeping[place] = self._link.spawn(self._keep(place, dialer), f"echo {place}")
            await asyncio.sleep(LOOK_S)

    async def _keep(self, place: str, dialer: Dialer) -> None:
        """Echoes by way of the server at this address, whenever it is there."""
        while True:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            try:
                client = await dialer.dial(_ends(ended), DIAL_S)
            except DmscError as error:
                log.debug("no echo of a server", server=place, reason=error.text)
                await asyncio.sleep(dial.jittered(LOOK_S))
                continue
            try:
                server = str(client._server_info.get("server_id", place))
                known = self._ends.get(server)
                if known is None:
                    await self._listen(place, server, client, ended)
            finally:
                await dial.close(client)
            if known is not None:  # it has several addresses
                await asyncio.wait({known})
            await asyncio.sleep(dial.jittered(LOOK_S))

    async def _listen(self, place: str, server: str, client: Client, ended: asyncio.Future[None]) -> None:
        """Until the connection has ended, or was silent for too long."""
        self._ends[server] = ended
        why = "its connection has ended"
        try:
            said = f"{inboxes.of_connection(self._link.inbox_prefix)}.{inboxes.SELF}.echo"
            own = f"{self._link.inbox_prefix}."

            async def again(message: Msg) -> None:
                if message.reply.startswith(own):
                    await client.publish(message.reply)

            await client.subscribe(said, cb=again)
            while await self._echo(said, ended):
                self._heard.returned(server)
                if not self.hurry.is_set():
                    hurried = asyncio.ensure_future(self.hurry.wait())
                    either: set[asyncio.Future[Any]] = {hurried, ended}
                    try:
                        await asyncio.wait(either, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        hurried.cancel()
                else:
                    await asyncio.wait({ended}, timeout=self._beat_s)
            if not ended.done():
                why = f"it has been silent for {SILENT_MOST_S:g} s, and who was connected there has left it"
        except (DmscError, nats.errors.Error, OSError) as error:
            why = dial.plain(error)
        finally:
            del self._ends[server]
            if not ended.done():
                ended.set_result(None)
            self._heard.left(server)
        if self._link.closing:
            return
        log.warning("nobody waits for this server of the bus any more", server=place, reason=why)

    async def _echo(self, said: str, ended: asyncio.Future[None]) -> bool:
        """Whether one came back, however late, before the connection's end and `SILENT_MOST_S`."""
        silent_s = 0.0
        with self._link.question(said, answerer=inboxes.SELF, patient=True) as (inbox, asked):
            while silent_s < SILENT_MOST_S:
                if self._link.online.is_set():
                    await self._link.client.publish(said, reply=inbox)
                began = self._clock()
                outcomes: set[asyncio.Future[Any]] = {asked.answer, ended}
                await asyncio.wait(outcomes, timeout=REPEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    return False
                if asked.answer.done():
                    asked.answer.result()
                    return True
                # time in which we ourselves stood still, or were not connected, is not its silence
                if self._link.online.is_set():
                    silent_s += min(self._clock() - began, 2 * REPEAT_S)
        return False


def _ends(ended: asyncio.Future[None]) -> Listener:
    async def closed(_: Client) -> None:
        if not ended.done():
            ended.set_result(None)

    async def nothing(*_: object) -> None:
        """A pinned connection goes nowhere else."""

    return Listener(
        error=nothing, disconnected=nothing, reconnected=nothing, closed=closed, lame_duck=nothing
    )
