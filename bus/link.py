"""One NATS connection, looked after: dialled, kept, re-made, asked through, closed in any state.

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
import itertools
import random
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import nats.errors
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from bus.logs import get_logger
from schemas.errors import BadMessage, BusUnreachable, DeadlineExceeded, DmscError, NoResponders, Refused

log = get_logger("bus.link")

Token = str | Callable[[], str]
"""A bearer token, or what gives the present one at each dial (tokens expire)."""
MessageCallback = Callable[[Msg], Awaitable[None]]
Callback = Callable[[], Awaitable[None]]

BUFFER_BYTES = 16 << 20
"""Published while disconnected: kept up to here and sent after the reconnect, then refused."""
PRESSURE_BYTES = 1 << 20
"""Pending output at which a publisher waits for the server to catch up. With the largest message on
top it stays below BUFFER_BYTES, so that nats-py's own forced flush, which swallows cancellation, is
never reached."""
RECONNECT_FIRST_S, RECONNECT_MOST_S = 0.05, 1.0
"""Pause before a reconnect attempt: doubling between these, times a random half to whole."""
PING_INTERVAL_S = 10
"""A hung server (no EOF) is noticed after three of these."""

_denial = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')


@dataclass(slots=True)
class _Question:
    """Something asked through the link's inbox. `patient` ones outlive a lost connection and a 503."""

    subject: str
    answer: asyncio.Future[Msg]
    patient: bool = False
    unheard: bool = False


def _expire(asked: _Question, timeout_s: float) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(
            DeadlineExceeded(f"no answer on {asked.subject} within {timeout_s:g} s", subject=asked.subject)
        )


class Lost:
    """Put into every open stream when the connection breaks."""


def asked_to_end() -> bool:
    """Whether this very task is being cancelled, or something inside it merely raised CancelledError.

    nats-py ends a subscription for good, silently, when a handler lets the latter out.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(slots=True, eq=False)
class Feed:
    """A subscription that survives the client it was made on."""

    subject: str
    queue: str
    callback: MessageCallback
    pending_limit: int
    on_drop: Callable[[], None]
    sub: NatsSubscription | None = None


@dataclass(slots=True)
class Stats:
    reconnects: int = 0
    denied: int = 0
    told: set[str] = field(default_factory=set)


class Link:
    """The connection of one `Bus`. Not for use outside `bus/`."""

    def __init__(self, servers: Sequence[str], *, name: str, token: Token | None, inbox_prefix: str) -> None:
        self.servers = list(servers)
        self.name = name
        self.stats = Stats()
        self.online = asyncio.Event()
        self._awake = asyncio.Event()  # online or closing: nobody waits for a link that is gone
        self.back: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the next reconnect
        self.on_reconnect: list[Callback] = []
        self._token = token
        self._client: Client | None = None
        self._inbox = f"{inbox_prefix}.{secrets.token_hex(6)}"
        self._numbers = itertools.count(1)
        self._questions: dict[str, _Question] = {}
        self._streams: set[asyncio.Queue[Msg | Lost]] = set()
        self._feeds: list[Feed] = []
        self._subscribing: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._attempts = 0
        self._refusal: str | None = None
        self._last_error = ""
        self._closing = False

    # --- life ------------------------------------------------------------------------------------------

    async def open(self, timeout_s: float) -> None:
        """Dials.

        Raises:
            Refused: the server is there and does not accept the token.
            BusUnreachable: nothing answers within `timeout_s`.
        """
        await self._dial(timeout_s)
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
    def closing(self) -> bool:
        return self._closing

    def unreachable(self) -> DmscError:
        """Why nothing can be sent now, in one line."""
        where = ", ".join(_bare(url) for url in self.servers)
        if self._closing:
            return BusUnreachable(f"the bus connection of {self.name} is closed", servers=where)
        if self._refusal:
            return Refused(
                f"the bus at {where} refuses {self.name}: {self._refusal}; check its token", servers=where
            )
        reason = f" ({self._last_error})" if self._last_error else ""
        return BusUnreachable(
            f"no bus at {where}{reason}; is it running, and is that its address?", servers=where
        )

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
            await _close_client(self._client)
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

    @contextlib.contextmanager
    def question(self, subject: str, *, patient: bool = False) -> Iterator[tuple[str, _Question]]:
        """An inbox for one answer, and where that answer will be."""
        number = str(next(self._numbers))
        asked = _Question(subject, asyncio.get_running_loop().create_future(), patient)
        self._questions[number] = asked
        try:
            yield f"{self._inbox}.{number}", asked
        finally:
            del self._questions[number]
            if asked.answer.done() and not asked.answer.cancelled():
                asked.answer.exception()  # seen; asyncio need not complain that it never was

    async def ask(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Msg:
        """One question, one answer.

        Raises:
            BusUnreachable: not connected, or the connection broke meanwhile (at once, not at the timeout).
            NoResponders: nobody listens on `subject`.
            DeadlineExceeded: no answer in time.
            Refused: the server does not let this identity publish there.
        """
        if not self.online.is_set():
            raise self.unreachable()
        with self.question(subject) as (inbox, asked):
            await self.send(subject, payload, reply=inbox, headers=headers)
            # Cheaper than asyncio.timeout, and this is on the way of every request.
            timer = asyncio.get_running_loop().call_later(timeout_s, _expire, asked, timeout_s)
            try:
                return await asked.answer
            finally:
                timer.cancel()

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[tuple[str, asyncio.Queue[Msg | Lost]]]:
        """An inbox for many messages; whoever asks for them bounds their number. `Lost` ends it.

        A subscription of its own: JetStream delivers under the subject of the stored message, so the
        common inbox could not tell whom it is for.
        """
        if not self.online.is_set():
            raise self.unreachable()
        queue: asyncio.Queue[Msg | Lost] = asyncio.Queue()

        async def arrived(message: Msg) -> None:
            queue.put_nowait(message)

        inbox = f"{self._inbox}.stream.{next(self._numbers)}"
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

    async def send(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publishes, with back-pressure while connected and a bounded buffer while not."""
        client = self.client
        if client.pending_data_size > PRESSURE_BYTES and self.online.is_set():
            with contextlib.suppress(DmscError):  # lost meanwhile: then it is buffered
                await self.barrier(timeout_s=30.0)
        try:
            await client.publish(subject, payload, reply=reply, headers=headers)
        except nats.errors.OutboundBufferLimitError:
            raise BusUnreachable(
                f"{self.unreachable()}; {BUFFER_BYTES >> 20} MiB wait to be sent, no more is kept"
            ) from None
        except nats.errors.MaxPayloadError:
            raise BadMessage(
                f"{len(payload):,} bytes for {subject}: the server takes {client.max_payload:,} at most",
                reason="oversized",
            ) from None
        except nats.errors.BadSubjectError:
            raise BadMessage(f"{subject!r} is not a subject", reason="subject") from None
        except (nats.errors.Error, OSError):
            raise self.unreachable() from None

    async def barrier(self, timeout_s: float = 10.0) -> None:
        """Returns once the server has read everything that was sent before.

        It is a message to our own inbox: it queues behind what is pending, the server handles one
        connection's commands in order, and refusals of earlier ones arrive before it does.
        """
        if not self.online.is_set():
            raise self.unreachable()
        with self.question(self._inbox) as (inbox, asked):
            await self.client.publish(inbox)
            try:
                async with asyncio.timeout(timeout_s):
                    await asked.answer
            except TimeoutError:
                raise DeadlineExceeded(f"the bus did not keep up within {timeout_s:g} s") from None

    # --- listening -------------------------------------------------------------------------------------

    async def subscribe(
        self,
        subject: str,
        callback: MessageCallback,
        *,
        queue: str = "",
        pending_limit: int = 65_536,
        on_drop: Callable[[], None] = lambda: None,
    ) -> Feed:
        """Listens; returns once the server has the subscription.

        Raises:
            Refused: the server does not let this identity listen there.
            BusUnreachable: not connected.
        """
        if not self.online.is_set():
            raise self.unreachable()
        feed = Feed(subject, queue, callback, pending_limit, on_drop)
        denied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._subscribing[subject.lower()] = denied
        try:
            await self._attach(feed)
            self._feeds.append(feed)
            await self.barrier()
            if denied.done():
                raise Refused(f"{self.name} may not listen on {subject}", subject=subject)
        except BaseException:
            await self.unsubscribe(feed)
            raise
        finally:
            self._subscribing.pop(subject.lower(), None)
        return feed

    async def unsubscribe(self, feed: Feed, *, drain_s: float = 0.0) -> None:
        """Stops listening. With `drain_s`, what has arrived is still handled, for at most that long."""
        if feed in self._feeds:
            self._feeds.remove(feed)
        sub, feed.sub = feed.sub, None
        if sub is None or self._client is None or self._client.is_closed:
            return
        with contextlib.suppress(nats.errors.Error, OSError, DmscError):
            if drain_s > 0 and self.online.is_set():
                # drain() believes that flush() is a barrier; with this one before it, it loses nothing.
                await self.client._send_unsubscribe(sub._id)
                await self.barrier(timeout_s=drain_s)
                draining = self.spawn(sub.drain(), "drain")  # type: ignore[no-untyped-call]  # never cancelled: see the top of this file
                await asyncio.wait({draining}, timeout=drain_s)
                if draining.done():
                    return
            await sub.unsubscribe()

    async def _attach(self, feed: Feed) -> None:
        feed.sub = await self.client.subscribe(
            feed.subject,
            queue=feed.queue,
            cb=feed.callback,
            pending_msgs_limit=feed.pending_limit,
        )

    async def _make_inbox(self) -> None:
        await self.client.subscribe(f"{self._inbox}.*", cb=self._answered)

    async def _answered(self, message: Msg) -> None:
        number = message.subject.rpartition(".")[2]
        asked = self._questions.get(number)
        if asked is None or asked.answer.done():
            return
        if not message.data and message.headers and message.headers.get("Status") == "503":
            if asked.patient:
                asked.unheard = True
            else:
                asked.answer.set_exception(
                    NoResponders(f"nobody listens on {asked.subject}", subject=asked.subject)
                )
            return
        asked.answer.set_result(message)

    # --- what nats-py tells us ---------------------------------------------------------------------------

    async def _dial(self, timeout_s: float) -> None:
        refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        client = Client()

        async def on_error(error: Exception) -> None:
            self._last_error = _plain(error)
            if "authorization violation" in str(error).lower() and not refused.done():
                refused.set_result(_plain(error))
            await self._on_error(error)

        async def on_closed() -> None:
            if client is self._client:
                self._on_closed()

        connecting = asyncio.create_task(
            client.connect(
                servers=self.servers,
                name=self.name,
                token=self._token,
                error_cb=on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=on_closed,
                lame_duck_mode_cb=self._on_lame_duck,
                connect_timeout=max(1, round(timeout_s)),
                reconnect_time_wait=0.1,  # type: ignore[arg-type]  # a float is fine, and 1 s would be long
                max_reconnect_attempts=-1,
                reconnect_to_server_handler=self._next_server,
                ping_interval=PING_INTERVAL_S,
                pending_size=BUFFER_BYTES,
                inbox_prefix=self._inbox,
            )
        )
        try:
            outcomes: set[asyncio.Future[Any]] = {connecting, refused}
            await asyncio.wait(outcomes, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done() and connecting.exception() is None:
                self._client, self._refusal, self._last_error = client, None, ""
                return
            if connecting.done():
                self._last_error = _plain(connecting.exception() or "")
            if refused.done():
                self._refusal = refused.result()
            raise self.unreachable()
        finally:
            if self._client is not client:
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)
                await _close_client(client)

    def _next_server(self, pool: list[Server], info: dict[str, Any]) -> tuple[Server | None, float]:
        pause = min(RECONNECT_MOST_S, RECONNECT_FIRST_S * 2 ** min(self._attempts, 10))
        chosen = pool[self._attempts % len(pool)]
        self._attempts += 1
        return chosen, pause * random.uniform(0.5, 1.0)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            for feed in self._feeds:
                if feed.sub is error.sub:
                    feed.on_drop()
            return
        denial = _denial.search(str(error).lower())
        if denial is not None:
            self._on_denied(denial.group(1), denial.group(2))
            return
        log.debug("bus error", error=_plain(error))

    def _on_denied(self, what: str, subject: str) -> None:
        """The server answers in lower case (nats-py lowers it), so subjects are compared that way."""
        self.stats.denied += 1
        if what == "subscription":
            waiting = self._subscribing.get(subject)
            if waiting is not None:
                if not waiting.done():
                    waiting.set_result(None)
                return
        else:
            for number, asked in list(self._questions.items()):
                mine = f"{self._inbox}.{number}".lower()  # a barrier: denied is as good as delivered
                if subject in (asked.subject.lower(), mine) and not asked.answer.done():
                    asked.answer.set_exception(
                        Refused(f"{self.name} may not publish on {asked.subject}", subject=asked.subject)
                    )
        if subject not in self.stats.told:
            self.stats.told.add(subject)
            log.error("the bus refuses", what=what, subject=subject, service=self.name)

    async def _on_disconnected(self) -> None:
        if self.online.is_set() and not self._closing:
            log.warning("bus connection lost", service=self.name)
        self._set_offline()
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        for asked in self._questions.values():
            if not asked.answer.done() and (self._closing or not asked.patient):
                asked.answer.set_exception(
                    BusUnreachable("the connection to the bus broke while waiting for the answer")
                    if not self._closing
                    else self.unreachable()
                )
        for stream in self._streams:
            stream.put_nowait(Lost())

    async def _on_reconnected(self) -> None:
        self._attempts = 0
        self._refusal, self._last_error = None, ""
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

    def _on_closed(self) -> None:
        """Closed, and not by us: the server took the credential away, or an error it does not forgive."""
        if self._closing:
            return
        last = self._client.last_error if self._client else None
        self._last_error = _plain(last) if last else "closed by the server"
        if "authorization" in self._last_error.lower() or "authentication" in self._last_error.lower():
            self._refusal = self._last_error
        self._set_offline()
        self._drop_waiting()
        log.error("bus connection closed by the server", service=self.name, reason=self._last_error)
        self.spawn(self._redial(), "redial")

    async def _redial(self) -> None:
        pause = RECONNECT_FIRST_S
        while True:
            try:
                await self._dial(5.0)
                await self._make_inbox()
                for feed in list(self._feeds):
                    await self._attach(feed)
                await self._on_reconnected()
                return
            except (DmscError, nats.errors.Error, OSError) as error:
                log.debug("redial failed", error=str(error))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, RECONNECT_MOST_S)


async def _close_client(client: Client) -> None:
    """Closes without the surprises: pending data on a dead socket raises, and leaves tasks behind."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(2.0):
            if not client.is_connected:
                # Nothing can be sent any more; close() would try to, raise, and leave its tasks running.
                client._pending.clear()
                client._pending_data_size = 0
            await client.close()


def _plain(error: BaseException | str) -> str:
    text = str(error) or type(error).__name__
    return text.removeprefix("nats: ").strip("'\" ")


def _bare(url: str) -> str:
    """A URL without its credentials, for people."""
    head, at, tail = url.rpartition("@")
    return f"{head.split('://')[0]}://{tail}" if at and "://" in head else tail
