"""One NATS connection, looked after: kept, made again, asked through, closed in any state.

What nats-py does not do by itself, and why this file exists (DESIGN §3):

* A request in flight waits out its timeout when the connection breaks. Here every question hangs on
  the link's own inbox and is failed the moment the connection is lost.
* A refused subscribe or publish is told only to `error_cb`. Here it is matched with whoever asked.
* `flush()` writes its PING ahead of what is still pending, and a cancelled `flush()` kills the read
  loop when its PONG arrives. Here a barrier is a message to ourselves, behind all others.
* An expired or revoked credential closes the client for good. Here a new client is dialled, with a
  fresh token, and every subscription is made again.
* `close()` raises while disconnected with data pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from bus.logs import get_logger
from bus.nats import dialer as dial
from bus.nats import reply_subjects as inboxes
from bus.nats.dialer import RECONNECT_FIRST_S, RECONNECT_MOST_S, Dialer, Listener, Token
from bus.nats.durable_subscription import DurableSubscription as DurableSubscription
from bus.nats.durable_subscription import MessageCallback
from bus.nats.pending_requests import PendingRequest, PendingRequests
from bus.nats.write_buffer import WriteBuffer
from schemas.envelope import EntityKind
from schemas.errors import BusUnreachable, DeadlineExceeded, DmscError, Refused

log = get_logger("bus.link")

Callback = Callable[[], Awaitable[None]]
REDIAL_S = 5.0
_denial = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')


class JetStreamBroker(Protocol):
    """Who asks JetStream for a connection that may not: `bus.guard.brokered_jetstream.BrokeredJetStream`."""

    @property
    def scope(self) -> str: ...

    def consumer(self, stream: str, subjects: str) -> str: ...

    async def ask(
        self,
        call: str,
        body: bytes,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        repeatable: bool = False,
        owner: str = "",
    ) -> Msg: ...

    async def send(self, call: str, body: bytes, reply: str = "") -> None: ...


class ConnectionLost:
    """Put into every open stream when the connection breaks."""


def asked_to_end() -> bool:
    """Whether this very task is being cancelled, or something inside it merely raised CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(slots=True)
class ConnectionStats:
    reconnects: int = 0
    denied: int = 0
    told: set[str] = field(default_factory=set)


class NatsConnection:
    """The connection of one `Bus`. Not for use outside `bus/`."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        name: str,
        label: str,
        token: Token | None,
        inbox_prefix: str,
        kind: EntityKind = EntityKind.CLIENT,
        first_pause_s: float | None = None,
    ) -> None:
        self.name = name
        self.stats = ConnectionStats()
        self.broker: JetStreamBroker | None = None  # asks JetStream for us; None: we do
        self.online = asyncio.Event()
        self._awake = asyncio.Event()  # online or closing: nobody waits for a link that is gone
        self.back: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the next reconnect
        self.on_reconnect: list[Callback] = []
        self._dialer = Dialer(
            servers, name=name, label=label, token=token, kind=kind, first_pause_s=first_pause_s
        )
        self._client: Client | None = None
        self.inbox_prefix = inbox_prefix
        self._inbox = inboxes.of_connection(inbox_prefix)
        self._questions = PendingRequests(self._inbox)
        self._streams: set[asyncio.Queue[Msg | ConnectionLost]] = set()
        self._subscriptions: list[DurableSubscription] = []
        self._subscribing: dict[str, list[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._outbox = WriteBuffer(lambda: self.client, self.unreachable, self.online)
        self._refusal: str | None = None
        self._closing = False

    # --- life ------------------------------------------------------------------------------------------

    async def open(self, timeout_s: float) -> None:
        """Dials.

        Raises:
            Refused: the server is there and does not accept the token.
            BusUnreachable: nothing answers within `timeout_s`.
        """
        self._client = await self._dialer.dial(self._listener(), timeout_s)
        self._set_online()
        await self._make_inbox()

    async def wait_online(self) -> None:
        """Waits out a disconnect.

        Raises:
            BusUnreachable: the link is being closed.
        """
        await self._awake.wait()
        if self._closing:
            raise self.unreachable()

    def _set_online(self) -> None:
        self.online.set()
        self._awake.set()

    def _set_offline(self) -> None:
        self.online.clear()
        if not self._closing:
            self._awake.clear()

    @property
    def client(self) -> Client:
        if self._client is None:
            raise self.unreachable()
        return self._client

    @property
    def servers(self) -> tuple[str, ...]:
        return self._dialer.servers

    def cluster(self) -> dict[str, Dialer]:
        """One for each server that this connection may move to, as far as it knows, by address; none where
        the server is one alone."""
        if not self.online.is_set() or not self.client._server_info.get("cluster"):
            return {}
        pool = [(server.uri.geturl(), server.tls_name) for server in self.client._server_pool]
        return {dial.bare(url): self._dialer.at(url, tls_name, "echo") for url, tls_name in pool}

    @property
    def guarded(self) -> bool:
        """Whether the server holds us to what we may."""
        return self._dialer.guarded

    @property
    def wants_signatures(self) -> bool:
        """Whether the server, as it last said, has a nonce signed: those with a guard do."""
        return bool(self.client._server_info.get("nonce"))

    @property
    def closing(self) -> bool:
        return self._closing

    def unreachable(self) -> DmscError:
        """Why nothing can be sent now, in one line."""
        if self._closing:
            return BusUnreachable(f"the bus connection of {self.name} is closed", servers=self._dialer.where)
        if self._refusal:
            return self._dialer.refused(self._refusal)
        return self._dialer.unreachable()

    async def close(self) -> None:
        """Ends it, whatever state it is in; what is pending is sent if that takes less than a second."""
        if self._closing:
            return
        if self.online.is_set():
            with contextlib.suppress(DmscError, nats.errors.Error):
                await self.barrier(timeout_s=1.0)
        self._closing = True
        self.online.clear()
        self._awake.set()
        self._drop_waiting()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await dial.close(self._client)
        self._streams.clear()

    def spawn(self, coroutine: Any, name: str) -> asyncio.Task[Any]:
        """A task that this link owns: ended with it, its failure logged."""
        task: asyncio.Task[Any] = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", task=task.get_name(), error=repr(error))

    # --- asking ----------------------------------------------------------------------------------------

    def question(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        answerer: str = inboxes.JETSTREAM,
        patient: bool = False,
    ) -> PendingRequest:
        """`with link.question(subject, payload) as (inbox, asked):` an inbox for one answer to this, which
        nobody but `answerer` can give (`bus.nats.reply_subjects`), and where it will be."""
        return self._questions.new(subject, payload, answerer, patient=patient)

    async def ask(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        repeat_s: float | None = None,
        answerer: str = inboxes.JETSTREAM,
    ) -> Msg:
        """One question, one answer. With `repeat_s` it is said again every so often: whoever listens may have
        come after it was said, and a tap that was there hides from us that nobody else was.

        Raises:
            BusUnreachable: not connected, or the connection broke meanwhile (at once, not at the timeout).
            NoResponders: nobody listens on `subject`.
            DeadlineExceeded: no answer in time.
            Refused: the server does not let this identity publish there.
        """
        if not self.online.is_set():
            raise self.unreachable()
        with self.question(subject, payload, answerer=answerer) as (inbox, asked):
            await self.send(subject, payload, reply=inbox, headers=headers)
            # Cheaper than asyncio.timeout, and this is on the way of every request.
            timer = asyncio.get_running_loop().call_later(timeout_s, asked.expire, timeout_s)
            try:
                while repeat_s is not None:
                    await asyncio.wait((asked.answer,), timeout=repeat_s)
                    if asked.answer.done():
                        break
                    await self.send(subject, payload, reply=inbox, headers=headers)
                return await asked.answer
            finally:
                timer.cancel()

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[tuple[str, asyncio.Queue[Msg | ConnectionLost]]]:
        """An inbox for many messages; whoever asks for them bounds their number. `ConnectionLost` ends it.

        A subscription of its own: JetStream delivers under the subject of the stored message, so the
        common inbox could not tell whom it is for.
        """
        if not self.online.is_set():
            raise self.unreachable()
        queue: asyncio.Queue[Msg | ConnectionLost] = asyncio.Queue()

        async def arrived(message: Msg) -> None:
            queue.put_nowait(message)

        inbox = f"{self._inbox}.{inboxes.JETSTREAM}.stream.{secrets.token_hex(8)}"
        self._streams.add(queue)
        try:
            sub = await self.client.subscribe(inbox, cb=arrived)
        except nats.errors.Error:
            self._streams.discard(queue)
            raise self.unreachable() from None
        try:
            yield inbox, queue
        finally:
            self._streams.discard(queue)
            with contextlib.suppress(nats.errors.Error, OSError):
                await sub.unsubscribe()

    def send(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> Coroutine[Any, Any, None]:
        """Publishes; see `WriteBuffer.send`."""
        return self._outbox.send(subject, payload, reply=reply, headers=headers)

    def write(self, commands: bytes, count: int) -> Coroutine[Any, Any, None]:
        """Many publications in one piece; see `WriteBuffer.write`."""
        return self._outbox.write(commands, count)

    async def barrier(self, timeout_s: float | None = 10.0) -> None:
        """Returns once the server has read everything that was sent before. None: however long that takes.

        It is a message to our own inbox: it queues behind what is pending, the server handles one
        connection's commands in order, and refusals of earlier ones arrive before it does.
        """
        if not self.online.is_set():
            raise self.unreachable()
        with self.question(self._inbox, answerer=inboxes.SELF) as (inbox, asked):
            await self.client.publish(inbox)
            try:
                async with asyncio.timeout(timeout_s):
                    await asked.answer
            except TimeoutError:
                raise DeadlineExceeded(f"the bus did not keep up within {timeout_s or 0:g} s") from None

    # --- listening -------------------------------------------------------------------------------------

    async def subscribe(
        self,
        subject: str,
        callback: MessageCallback | None,
        *,
        queue: str = "",
        pending_limit: int = 65_536,
        on_drop: Callable[[], None] = lambda: None,
    ) -> DurableSubscription:
        """Listens; returns once the server has the subscription. Without a callback, take from the feed.

        Raises:
            Refused: the server does not let this identity listen there.
            BusUnreachable: not connected.
        """
        if not self.online.is_set():
            raise self.unreachable()
        feed = DurableSubscription(
            subject, queue=queue, callback=callback, pending_limit=pending_limit, on_drop=on_drop
        )
        denied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._subscribing.setdefault(subject.lower(), [])
        waiting.append(denied)
        try:
            await self._attach(feed)
            self._subscriptions.append(feed)
            await self.barrier()
            if denied.done():
                raise Refused(f"{self.name} may not listen on {subject}", subject=subject)
        except BaseException:
            await self.unsubscribe(feed)
            raise
        finally:
            waiting.remove(denied)
            if not waiting:
                self._subscribing.pop(subject.lower(), None)
        return feed

    async def unsubscribe(self, feed: DurableSubscription, *, drain_s: float = 0.0) -> None:
        """Stops listening. With `drain_s`, what has been sent to us is still handled, for at most that long.

        nats-py's own drain believes that flush() is a barrier, and may lose the last messages.
        """
        if feed in self._subscriptions:
            self._subscriptions.remove(feed)
        if drain_s > 0:
            with contextlib.suppress(nats.errors.Error, OSError, DmscError, TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._drain(feed)
        with contextlib.suppress(nats.errors.Error, OSError):
            await feed.detach()

    async def _drain(self, feed: DurableSubscription) -> None:
        if self.online.is_set():
            with contextlib.suppress(DmscError):  # lost meanwhile: then nothing more comes
                await feed.silence(self.client)
                await self.barrier()
        await feed.messages.join()

    async def _attach(self, feed: DurableSubscription) -> None:
        try:
            await feed.attach(self.client)
        except (nats.errors.Error, OSError):
            raise self.unreachable() from None

    async def _make_inbox(self) -> None:
        await self.client.subscribe(f"{self._inbox}.*.*.*", cb=self._questions.answered)

    # --- what nats-py tells us ---------------------------------------------------------------------------

    def _listener(self) -> Listener:
        return Listener(
            error=self._on_error,
            disconnected=self._on_disconnected,
            reconnected=self._on_reconnected,
            closed=self._on_closed,
            lame_duck=self._on_lame_duck,
        )

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            for feed in self._subscriptions:
                if feed.is_of(error.sub):
                    feed.on_drop()
            return
        denial = _denial.search(str(error).lower())
        if denial is not None:
            self._on_denied(denial.group(1), denial.group(2))
            return
        if self._dialer.refuses(error) and self._client is not None and not self.online.is_set():
            if self._refusal is None:
                log.error("the bus refuses this connection", service=self.name, reason=dial.plain(error))
            self._refusal = dial.plain(error)
            return
        log.debug("bus error", error=dial.plain(error))

    def _on_denied(self, what: str, subject: str) -> None:
        """The server answers in lower case (nats-py lowers it), so subjects are compared that way."""
        self.stats.denied += 1
        if what == "subscription":
            waiting = self._subscribing.get(subject)
            if waiting:
                for denied in waiting:
                    if not denied.done():
                        denied.set_result(None)
                return
        else:
            self._questions.denied(subject, self.name)
        if subject not in self.stats.told:
            self.stats.told.add(subject)
            log.error("the bus refuses", what=what, subject=subject, service=self.name)

    async def _on_disconnected(self) -> None:
        if self.online.is_set() and not self._closing:
            log.warning("bus connection lost", service=self.name)
        self._set_offline()
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        if self._closing:
            self._questions.end(self.unreachable())
        else:
            self._questions.lost()
        for stream in self._streams:
            stream.put_nowait(ConnectionLost())

    async def _on_reconnected(self) -> None:
        self._dialer.succeeded()
        self._refusal = None
        self.stats.reconnects += 1
        self._set_online()
        back, self.back = self.back, asyncio.get_running_loop().create_future()
        back.set_result(None)
        log.info("bus connection is back", service=self.name)
        for callback in list(self.on_reconnect):
            self.spawn(callback(), "on reconnect")

    async def _on_lame_duck(self) -> None:
        """The server announces its end: go to another one while there is time."""
        if self._client is not None and len(self._client.server_pool) > 1:
            self.spawn(self._client.force_reconnect(), "lame duck")

    async def _on_closed(self, client: Client) -> None:
        """Closed, and not by us: the server took the credential away, or an error it does not forgive."""
        if self._closing or client is not self._client:
            return
        reason = dial.plain(client.last_error) if client.last_error else "closed by the server"
        if "authorization" in reason.lower() or "authentication" in reason.lower():
            self._refusal = reason
        self._set_offline()
        self._drop_waiting()
        log.error("bus connection closed by the server", service=self.name, reason=reason)
        self.spawn(self._redial(), "redial")

    async def _redial(self) -> None:
        """A new client in place of one that was closed for good, with all that hung on the old one."""
        pause = RECONNECT_FIRST_S
        while True:
            try:
                self._client = await self._dialer.dial(self._listener(), REDIAL_S)
                await self._make_inbox()
                for feed in list(self._subscriptions):
                    await self._attach(feed)
                await self._on_reconnected()
                return
            except Refused as error:
                self._refusal = self._refusal or error.text
            except (DmscError, nats.errors.Error, OSError) as error:
                log.debug("redial failed", error=str(error))
            await asyncio.sleep(dial.jittered(pause))
            pause = min(pause * 2, RECONNECT_MOST_S)
