"""One NATS connection that survives disconnects, carries requests, and can be closed in any state.

nats-py lacks the following, which is why this file exists (DESIGN §3):

* In nats-py, a request in flight waits out its timeout when the connection breaks. Here every request
  waits on the connection's own inbox and fails the moment the connection is lost.
* nats-py reports a refused subscribe or publish only to `error_cb`. Here it is matched with its caller.
* nats-py's `flush()` writes its PING ahead of what is still pending, and a cancelled `flush()` kills the
  read loop when its PONG arrives. Here a barrier is a message to ourselves, behind all others.
* An expired or revoked credential closes nats-py's client for good. Here a new client is dialled with a
  fresh token, and every subscription is made again.
* nats-py's `close()` raises while disconnected with data pending.
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
from bus.nats import dialer, reply_subjects
from bus.nats.dialer import ConnectionTimes, Dialer, Listener, Token
from bus.nats.durable_subscription import DurableSubscription as DurableSubscription
from bus.nats.durable_subscription import MessageCallback
from bus.nats.nats_internals import server_info, server_pool
from bus.nats.pending_requests import PendingRequest, PendingRequests
from bus.nats.write_buffer import WriteBuffer
from bus.tasks import TaskSet
from schemas.envelope import EntityKind
from schemas.errors import BusUnreachable, DeadlineExceeded, DmscError, Refused

log = get_logger("bus.nats.client")

Callback = Callable[[], Awaitable[None]]
_denial = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')


class JetStreamBroker(Protocol):
    """Calls JetStream for a connection that may not do so itself: `BrokeredJetStream` in `bus.guard`."""

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
    """The marker that every open message stream receives when the connection breaks."""


def asked_to_end() -> bool:
    """Whether the current task is being cancelled, as opposed to code inside it raising CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(slots=True)
class ConnectionStats:
    reconnects: int = 0
    denied: int = 0
    denied_subjects: set[str] = field(default_factory=set)


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
        times: ConnectionTimes = ConnectionTimes(),
    ) -> None:
        self.name = name
        self.times = times
        self.stats = ConnectionStats()
        self.broker: JetStreamBroker | None = None  # calls JetStream for us; None: we call it ourselves
        self.online = asyncio.Event()
        self._awake = asyncio.Event()  # online or closing: nobody waits for a closed connection
        self.back: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # the next reconnect
        self.on_reconnect: list[Callback] = []
        self._dialer = Dialer(servers, name=name, label=label, token=token, kind=kind, times=times)
        self._client: Client | None = None
        self.inbox_prefix = inbox_prefix
        self._inbox = reply_subjects.of_connection(inbox_prefix)
        self._questions = PendingRequests(self._inbox)
        self._streams: set[asyncio.Queue[Msg | ConnectionLost]] = set()
        self._subscriptions: list[DurableSubscription] = []
        self._subscribing: dict[str, list[asyncio.Future[None]]] = {}
        self._tasks = TaskSet(self._log_failure)
        self._write_buffer = WriteBuffer(
            lambda: self.client, self.unreachable, self.online, times.pressure_pause_s
        )
        self._refusal: str | None = None
        self._closing = False

    # --- life ------------------------------------------------------------------------------------------

    async def open(self, timeout_s: float) -> None:
        """Connects.

        Raises:
            Refused: the server is there and does not accept the token.
            BusUnreachable: nothing answers within `timeout_s`.
        """
        self._client = await self._dialer.dial(self._listener(), timeout_s)
        self._set_online()
        await self._make_inbox()

    async def wait_online(self) -> None:
        """Waits until the connection is online.

        Raises:
            BusUnreachable: the connection is being closed.
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
        """A dialer for each server of a cluster by address; empty if there is only one server."""
        if not self.online.is_set() or not server_info(self.client).get("cluster"):
            return {}
        pool = server_pool(self.client)
        return {dialer.bare(url): self._dialer.at(url, tls_name, "echo") for url, tls_name in pool}

    @property
    def guarded(self) -> bool:
        """Whether the server enforces permissions on this connection."""
        return self._dialer.guarded

    @property
    def wants_signatures(self) -> bool:
        """Whether the server asked for a signed nonce; servers with an auth callout do."""
        return bool(server_info(self.client).get("nonce"))

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
        """Closes the connection in any state; pending data is sent if that takes less than a second."""
        if self._closing:
            return
        if self.online.is_set():
            with contextlib.suppress(DmscError, nats.errors.Error):
                await self.barrier(timeout_s=1.0)
        self._closing = True
        self.online.clear()
        self._awake.set()
        self._drop_waiting()
        await self._tasks.close()
        if self._client is not None:
            await dialer.close(self._client)
        self._streams.clear()

    def spawn(self, coroutine: Any, name: str) -> asyncio.Task[Any]:
        """A task that this connection owns: it is cancelled at the close, and its failure is logged."""
        return self._tasks.create(coroutine, name=name)

    @staticmethod
    def _log_failure(task: asyncio.Task[Any], error: BaseException) -> None:
        log.error("background task failed", task=task.get_name(), error=repr(error))

    # --- asking ----------------------------------------------------------------------------------------

    def question(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        answerer: str = reply_subjects.JETSTREAM,
        patient: bool = False,
    ) -> PendingRequest:
        """A pending request, for `with … as (inbox, request)`; the answer arrives in `request.answer`.

        Only `answerer` can publish to the inbox (`bus.nats.reply_subjects`).
        """
        return self._questions.new(subject, payload, answerer, patient=patient)

    async def ask(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: dict[str, str] | None = None,
        repeat_s: float | None = None,
        answerer: str = reply_subjects.JETSTREAM,
    ) -> Msg:
        """Sends a request and returns its answer.

        With `repeat_s` the request is sent again at that interval. The service may have subscribed only after
        the first sending; and if a tap listened then, the server does not report that nobody else did.

        Raises:
            BusUnreachable: not connected, or the connection broke meanwhile (at once, not at the timeout).
            NoResponders: nobody listens on `subject`.
            DeadlineExceeded: no answer in time.
            Refused: the server does not let this identity publish there.
        """
        if not self.online.is_set():
            raise self.unreachable()
        with self.question(subject, payload, answerer=answerer) as (inbox, request):
            await self.send(subject, payload, reply=inbox, headers=headers)
            # Cheaper than asyncio.timeout, and this is on the way of every request.
            timer = asyncio.get_running_loop().call_later(timeout_s, request.expire, timeout_s)
            try:
                while repeat_s is not None:
                    await asyncio.wait((request.answer,), timeout=repeat_s)
                    if request.answer.done():
                        break
                    await self.send(subject, payload, reply=inbox, headers=headers)
                return await request.answer
            finally:
                timer.cancel()

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[tuple[str, asyncio.Queue[Msg | ConnectionLost]]]:
        """An inbox for many messages; the requester bounds their number. `ConnectionLost` comes last."""
        # It has its own subscription: JetStream delivers under the subject of the stored message, so the
        # common inbox could not tell which reader a delivery is for.
        if not self.online.is_set():
            raise self.unreachable()
        queue: asyncio.Queue[Msg | ConnectionLost] = asyncio.Queue()

        async def enqueue(message: Msg) -> None:
            queue.put_nowait(message)

        inbox = f"{self._inbox}.{reply_subjects.JETSTREAM}.stream.{secrets.token_hex(8)}"
        self._streams.add(queue)
        try:
            sub = await self.client.subscribe(inbox, cb=enqueue)
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
        """Publishes one message; see `WriteBuffer.send`."""
        return self._write_buffer.send(subject, payload, reply=reply, headers=headers)

    def write(self, commands: bytes, count: int) -> Coroutine[Any, Any, None]:
        """Publishes many messages in one write; see `WriteBuffer.write`."""
        return self._write_buffer.write(commands, count)

    async def barrier(self, timeout_s: float | None = 10.0, *, repeat_s: float | None = None) -> None:
        """Returns once the server has read everything that was sent before.

        The barrier is a message to our own inbox. It queues behind what is pending, and the server handles
        one connection's commands in order, so refusals of earlier commands arrive before it. Without
        `timeout_s` it waits as long as that takes. With `repeat_s` it is sent again as often as that: a
        server drops messages to who is slow to read, and this one, too.
        """
        if not self.online.is_set():
            raise self.unreachable()
        with self.question(self._inbox, answerer=reply_subjects.SELF) as (inbox, request):
            try:
                async with asyncio.timeout(timeout_s):
                    while not request.answer.done():
                        if self.online.is_set():
                            await self.client.publish(inbox)
                        await asyncio.wait({request.answer}, timeout=repeat_s)
                request.answer.result()
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
        """Subscribes; returns once the server has it. Without a callback, take messages from its own queue.

        Raises:
            Refused: the server does not let this identity listen there.
            BusUnreachable: not connected.
        """
        if not self.online.is_set():
            raise self.unreachable()
        subscription = DurableSubscription(
            subject, queue=queue, callback=callback, pending_limit=pending_limit, on_drop=on_drop
        )
        denied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._subscribing.setdefault(subject.lower(), [])
        waiting.append(denied)
        try:
            await self._attach(subscription)
            self._subscriptions.append(subscription)
            await self.barrier()
            if denied.done():
                raise Refused(f"{self.name} may not listen on {subject}", subject=subject)
        except BaseException:
            await self.unsubscribe(subscription)
            raise
        finally:
            waiting.remove(denied)
            if not waiting:
                self._subscribing.pop(subject.lower(), None)
        return subscription

    async def unsubscribe(self, subscription: DurableSubscription, *, drain_s: float = 0.0) -> None:
        """Ends a subscription; messages already sent to us are handled first, for at most `drain_s`."""
        # nats-py's own drain takes flush() for a barrier and may lose the last messages.
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
        if drain_s > 0:
            with contextlib.suppress(nats.errors.Error, OSError, DmscError, TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._drain(subscription)
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.detach()

    async def _drain(self, subscription: DurableSubscription) -> None:
        if self.online.is_set():
            with contextlib.suppress(DmscError):  # the connection broke meanwhile: nothing more comes
                await subscription.silence(self.client)
                await self.barrier()
        await subscription.messages.join()

    async def _attach(self, subscription: DurableSubscription) -> None:
        try:
            await subscription.attach(self.client)
        except (nats.errors.Error, OSError):
            raise self.unreachable() from None

    async def _make_inbox(self) -> None:
        await self.client.subscribe(f"{self._inbox}.*.*.*", cb=self._questions.answered)

    # --- callbacks from nats-py --------------------------------------------------------------------------

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
            for subscription in self._subscriptions:
                if subscription.is_of(error.sub):
                    subscription.on_drop()
            return
        denial = _denial.search(str(error).lower())
        if denial is not None:
            self._on_denied(denial.group(1), denial.group(2))
            return
        if self._dialer.refuses(error) and self._client is not None and not self.online.is_set():
            if self._refusal is None:
                log.error("the bus refuses this connection", service=self.name, reason=dialer.plain(error))
            self._refusal = dialer.plain(error)
            return
        log.debug("bus error", error=dialer.plain(error))

    def _on_denied(self, what: str, subject: str) -> None:
        """Matches a refusal with its caller, in lower case, because nats-py lowers the server's text."""
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
        if subject not in self.stats.denied_subjects:
            self.stats.denied_subjects.add(subject)
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
        """Moves to another server, because this one has announced its shutdown."""
        if self._client is not None and len(self._client.server_pool) > 1:
            self.spawn(self._client.force_reconnect(), "lame duck")

    async def _on_closed(self, client: Client) -> None:
        """Redials after a close that we did not ask for: a revoked credential or a fatal protocol error."""
        if self._closing or client is not self._client:
            return
        reason = dialer.plain(client.last_error) if client.last_error else "closed by the server"
        if "authorization" in reason.lower() or "authentication" in reason.lower():
            self._refusal = reason
        self._set_offline()
        self._drop_waiting()
        log.error("bus connection closed by the server", service=self.name, reason=reason)
        self.spawn(self._redial(), "redial")

    async def _redial(self) -> None:
        """Replaces a client that was closed for good, and makes its subscriptions again."""
        pause = self.times.reconnect_first_s
        while True:
            try:
                self._client = await self._dialer.dial(self._listener(), self.times.redial_s)
                await self._make_inbox()
                for subscription in list(self._subscriptions):
                    await self._attach(subscription)
                await self._on_reconnected()
                return
            except Refused as error:
                self._refusal = self._refusal or error.text
            except (DmscError, nats.errors.Error, OSError) as error:
                log.debug("redial failed", error=str(error))
            await asyncio.sleep(dialer.jittered(pause))
            pause = min(pause * 2, self.times.reconnect_most_s)
