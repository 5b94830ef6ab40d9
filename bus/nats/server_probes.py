"""Probes which servers of a cluster carry messages: an echo goes through each of them and comes back.

The peers that a judging service listens to may be connected to another server than the service itself, and
that server alone may stand still. So the judge has one more connection to each server. It publishes an echo
on its main connection; the connection at the other server receives it and publishes it again; and it comes
back. That is the path of the judge's orders to peers at that server, and of their answers and heartbeats. The
connections use the judge's own identity and publish only to the judge itself (`bus.guard.permissions`,
`self._`).
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
from bus.nats import reply_subjects
from bus.nats.dialer import Dialer, Listener
from bus.nats.nats_internals import server_info
from schemas.errors import DmscError

if TYPE_CHECKING:
    from bus.nats.client import NatsConnection

log = get_logger("bus.nats.liveness")


class EchoListener(Protocol):
    """Receives the reports of `ServerProbes`."""

    def returned(self, server: str) -> None:
        """An echo came back through this server."""

    def left(self, server: str) -> None:
        """The server is closed or was silent for too long: do not wait for it any longer."""


class ServerProbes:
    """Probes all servers that one connection knows, if it knows more than one."""

    def __init__(self, connection: NatsConnection, heard: EchoListener, clock: Callable[[], float]) -> None:
        self.hurry = asyncio.Event()
        """Set while heard time is measured: one echo then follows the other after `times.beat_s`."""
        self._connection = connection
        self._listener = heard
        self._times = connection.times
        self._clock = clock
        self._probe_tasks: dict[str, asyncio.Task[None]] = {}  # by address
        self._ends: dict[str, asyncio.Future[None]] = {}  # ends of the connections, by the server's id

    async def run(self) -> None:
        """Probes until cancelled."""
        while True:
            for place, dialer in self._connection.cluster().items():
                if place not in self._probe_tasks:
                    self._probe_tasks[place] = self._connection.spawn(
                        self._keep(place, dialer), f"echo {place}"
                    )
            await asyncio.sleep(self._times.echo_look_s)

    async def _keep(self, place: str, dialer: Dialer) -> None:
        """Probes the server at this address whenever it is there."""
        while True:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            try:
                client = await dialer.dial(_ends(ended), self._times.echo_dial_s)
            except DmscError as error:
                log.debug("no echo of a server", server=place, reason=error.text)
                await asyncio.sleep(dial.jittered(self._times.echo_look_s))
                continue
            try:
                server = str(server_info(client).get("server_id", place))
                other_end = self._ends.get(server)
                if other_end is None:
                    await self._listen(place, server, client, ended)
            finally:
                await dial.close(client)
            if other_end is not None:  # the server has several addresses
                await asyncio.wait({other_end})
            await asyncio.sleep(dial.jittered(self._times.echo_look_s))

    async def _listen(self, place: str, server: str, client: Client, ended: asyncio.Future[None]) -> None:
        """Probes one server until its connection has ended or was silent for too long."""
        self._ends[server] = ended
        why = "its connection has ended"
        try:
            subject = (
                f"{reply_subjects.of_connection(self._connection.inbox_prefix)}.{reply_subjects.SELF}.echo"
            )
            own = f"{self._connection.inbox_prefix}."

            async def repeat(message: Msg) -> None:
                if message.reply.startswith(own):
                    await client.publish(message.reply)

            await client.subscribe(subject, cb=repeat)
            while await self._echo(subject, ended):
                self._listener.returned(server)
                if not self.hurry.is_set():
                    hurried = asyncio.ensure_future(self.hurry.wait())
                    either: set[asyncio.Future[Any]] = {hurried, ended}
                    try:
                        await asyncio.wait(
                            either, timeout=self._times.echo_idle_s, return_when=asyncio.FIRST_COMPLETED
                        )
                    finally:
                        hurried.cancel()
                else:
                    await asyncio.wait({ended}, timeout=self._times.beat_s)
            if not ended.done():
                most_s = self._times.echo_silent_most_s
                why = f"it has been silent for {most_s:g} s, and who was connected there has left it"
        except (DmscError, nats.errors.Error, OSError) as error:
            why = dial.plain(error)
        finally:
            del self._ends[server]
            if not ended.done():
                ended.set_result(None)
            self._listener.left(server)
        if self._connection.closing:
            return
        log.warning("nobody waits for this server of the bus any more", server=place, reason=why)

    async def _echo(self, subject: str, ended: asyncio.Future[None]) -> bool:
        """Whether an echo came back before the connection ended and within `echo_silent_most_s`."""
        silent_s = 0.0
        with self._connection.question(subject, answerer=reply_subjects.SELF, patient=True) as (
            inbox,
            request,
        ):
            while silent_s < self._times.echo_silent_most_s:
                if self._connection.online.is_set():
                    await self._connection.client.publish(subject, reply=inbox)
                started_at = self._clock()
                outcomes: set[asyncio.Future[Any]] = {request.answer, ended}
                await asyncio.wait(
                    outcomes, timeout=self._times.echo_repeat_s, return_when=asyncio.FIRST_COMPLETED
                )
                if ended.done():
                    return False
                if request.answer.done():
                    request.answer.result()
                    return True
                # Time in which we ourselves stood still or were not connected is not the server's silence.
                if self._connection.online.is_set():
                    silent_s += min(self._clock() - started_at, 2 * self._times.echo_repeat_s)
        return False


def _ends(ended: asyncio.Future[None]) -> Listener:
    async def closed(_: Client) -> None:
        if not ended.done():
            ended.set_result(None)

    async def nothing(*_: object) -> None:
        """Ignores the event: a pinned connection never moves to another server."""

    return Listener(
        error=nothing, disconnected=nothing, reconnected=nothing, closed=closed, lame_duck=nothing
    )
