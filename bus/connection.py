"""The bus for services: publish, request, command, subscribe, serve, append, history, buckets, objects."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from typing import Any, cast

from nats.aio.client import Client

from bus.guard.brokered_jetstream import BrokeredJetStream, callers
from bus.messaging import streams
from bus.messaging.batch_handlers import BatchHandler, BatchSubscription
from bus.messaging.dead_letters import dead_letter
from bus.messaging.disconnects import connection_name
from bus.messaging.handlers import Handler, OnUnusable, Server, Subscription
from bus.messaging.key_value import Bucket
from bus.messaging.object_store import ObjectStore
from bus.messaging.port import BusCounters, MessagingTimes
from bus.messaging.sealed_requests import RequestSealer
from bus.messaging.streams import StreamCalls
from bus.nats.client import NatsConnection
from bus.nats.dialer import ConnectionTimes, Token, inbox_prefix
from bus.nats.liveness import BusLiveness
from bus.security.sealing import Keyring
from bus.subject_row import Reply, Request, Subject
from bus.wire import codec
from bus.wire.packed import Sendable
from bus.wire.request_progress import WANTED, RequestProgress
from schemas.envelope import EntityKind, Envelope, Sender
from schemas.errors import BadInput, BadMessage, BusUnreachable, DeadlineExceeded, ErrorReply, NoResponders
from schemas.limits import REPEAT_FIRST_S, REPEAT_MOST_S

KNOWN_SUBJECTS = 4_096
"""How many concrete subjects are cached, so as not to be built again at each publish."""


class Bus(StreamCalls):
    """One service's connection to the bus: `async with Bus.connect(url, name=…, kind=…) as bus:`.

    While disconnected, published messages are kept in a bounded buffer (16 MiB) and sent after the reconnect;
    when the buffer is full, `publish` raises `BusUnreachable`. Calls of `request` and of buckets that are in
    flight fail at once; `command` and `append` wait and repeat. Subscriptions come back by themselves.
    """

    def __init__(
        self, connection: NatsConnection, sender: Sender, times: MessagingTimes = MessagingTimes()
    ) -> None:
        self.sender = sender
        self.metrics_url = ""  # the URL of this process's metrics, for its registrations
        self.counters = BusCounters(_connection=connection)
        self.connection = connection
        self.times = times
        self.sender_map = codec.sender_map(sender)
        self._ids = itertools.count(1)
        self._turn_ends = 0.0
        self._subscriptions: set[Subscription] = set()
        self._known_subjects: dict[tuple[Any, ...], str] = {}
        self._objects: ObjectStore | None = None
        self.pulse = BusLiveness(connection)
        self._sealer = RequestSealer(self, None)
        self._provisioned: int | None = None
        self.unreadable: set[tuple[str, int]] = set()
        """Unreadable values in buckets that were already kept in a stream, by subject and revision."""
        self.unreadable_bytes = 0
        """Bytes of unreadable values that are still to be kept."""

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        servers: str | Sequence[str],
        *,
        name: str,
        kind: EntityKind,
        token: Token | None = None,
        incarnation: str | None = None,
        connect_timeout_s: float = 5.0,
        times: MessagingTimes = MessagingTimes(),
        connection_times: ConnectionTimes = ConnectionTimes(),
    ) -> AsyncIterator[Bus]:
        """Connects, and closes at the end of the block.

        Args:
            servers: One URL, or several of one cluster, `nats://host:port`.
            name: The service's SID, which survives restarts.
            kind: The kind of the service.
            token: A credential or a mesh's root (`bus.security.credentials`), a user's token, or, for an
                unguarded server, a token or `user:password`; or a function that is called at each dial.
            incarnation: The incarnation, which does not survive restarts; random by default.
            connect_timeout_s: How long to try.
            times, connection_times: Timeouts and pauses; tests choose others.

        Raises:
            BusUnreachable: nothing answers at `servers`.
            Refused: the bus does not accept `token`.
        """
        urls = [servers] if isinstance(servers, str) else list(servers)
        if not urls:
            raise BadInput("no bus address given: pass nats://host:port")
        sender = Sender(name=name, kind=kind, incarnation=incarnation or secrets.token_hex(4))
        connection = NatsConnection(
            urls,
            name=name,
            label=connection_name(sender),
            token=token,
            inbox_prefix=inbox_prefix(name, kind, token),
            kind=kind,
            times=connection_times,
        )
        await connection.open(connect_timeout_s)
        bus = cls(connection, sender, times)
        bus._sealer = RequestSealer(bus, token)
        if as_whom := callers(token, name, kind, nonce=connection.wants_signatures):
            connection.broker = BrokeredJetStream(connection, sender, bus.next_id, as_whom)
        try:
            yield bus
        finally:
            await bus.close()

    def beside(self, *, name: str, kind: EntityKind, token: Token | None) -> AbstractAsyncContextManager[Bus]:
        """Another connection to the same servers with another identity; see `connect`."""
        return Bus.connect(
            self.connection.servers,
            name=name,
            kind=kind,
            token=token,
            times=self.times,
            connection_times=self.connection.times,
        )

    async def close(self) -> None:
        """Ends all subscriptions and the connection, in any state. Idempotent."""
        stopping = [subscription.stop(drain=False) for subscription in list(self._subscriptions)]
        await asyncio.gather(*stopping, return_exceptions=True)
        await self.connection.close()

    @property
    def link(self) -> NatsConnection:
        """`connection` by its name of the release before."""
        warnings.warn("Bus.link is called Bus.connection", DeprecationWarning, stacklevel=2)
        return self.connection

    @property
    def connected(self) -> bool:
        return self.connection.online.is_set()

    @property
    def raw(self) -> Client:
        """The NATS client, only for use inside `bus/`. Do not keep it: a redial replaces it."""
        return self.connection.client

    @property
    def max_payload_bytes(self) -> int:
        return min(int(self.connection.client.max_payload), codec.MAX_MESSAGE_BYTES)

    @property
    def keyring(self) -> Keyring:
        """The keys with which secrets are sealed and opened."""
        return self._sealer.keyring

    # --- one-way and two-way -------------------------------------------------------------------------------

    def next_id(self) -> str:
        """A new envelope id; it contains the incarnation and is unique within it."""
        return f"{self.sender.incarnation}-{next(self._ids)}"

    def _subject(self, row: Subject, tokens: dict[str, Any]) -> str:
        """The concrete subject, cached: services use few subjects, again and again."""
        key = (row.name, *tokens.items())
        known = self._known_subjects.get(key)
        if known is None:
            if len(self._known_subjects) >= KNOWN_SUBJECTS:
                self._known_subjects.clear()
            known = self._known_subjects[key] = row(**tokens)
        return known

    @staticmethod
    def cause_id(cause: Envelope | str | None) -> str | None:
        """The id of a cause; None leaves it to `codec.encode`, which takes the message being handled."""
        return cause.id if isinstance(cause, Envelope) else cause

    async def publish(
        self, row: Subject, message: Sendable, *, cause: Envelope | str | None = None, **tokens: Any
    ) -> str:
        """Publishes a message, which arrives at most once; returns the envelope's id.

        Raises:
            BusUnreachable: disconnected, and the buffer is full.
            BadMessage: the message is too large, or a value in `tokens` is not one token.
        """
        envelope_id = self.next_id()
        data = codec.encode(message, self.sender_map, envelope_id, self.cause_id(cause))
        await self.connection.send(self._subject(row, tokens), data)
        now = time.monotonic()
        if now > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.monotonic() + self.times.turn_s
        return envelope_id

    async def request(
        self,
        row: Subject[Request, Reply],
        message: Request,
        *,
        timeout_s: float = 5.0,
        repeat_s: float | None = None,
        absent_s: float = 0.0,
        cause: Envelope | str | None = None,
        seal_to: str = "",
        **tokens: Any,
    ) -> Reply:
        """Sends a request, once or every `repeat_s` under one envelope id, and returns the answer.

        While nobody listens, it is sent again for `absent_s` seconds: after a restart of the server, the
        service may be a moment behind us.

        Raises:
            DmscError: whatever the service raised, as the same class.
            NoResponders, DeadlineExceeded, BusUnreachable, Refused: see `NatsConnection.ask`.
        """
        data = await self._sealer.encode(row, message, cause, seal_to, timeout_s)
        subject, answerer = self._subject(row, tokens), row.answerer(tokens)
        began = time.monotonic()
        while True:
            left_s = began + timeout_s - time.monotonic()
            try:
                reply = await self.connection.ask(
                    subject, data, timeout_s=left_s, repeat_s=repeat_s, answerer=answerer
                )
            except NoResponders:
                if time.monotonic() + REPEAT_FIRST_S >= began + min(absent_s, timeout_s):
                    raise
                await asyncio.sleep(REPEAT_FIRST_S)
            else:
                return await self.answer_of(row, subject, reply.data)

    async def command(
        self,
        row: Subject[Request, Reply],
        message: Request,
        *,
        deadline_s: float = 30.0,
        while_heard: bool = False,
        moving: RequestProgress | None = None,
        cause: Envelope | str | None = None,
        may_repeat: Callable[[], bool] | None = None,
        seal_to: str = "",
        **tokens: Any,
    ) -> Reply:
        """Repeats a request under one envelope id until it is answered; survives lost messages and restarts.

        The service runs its handler once per id (`serve` remembers the answer), unless it was restarted in
        between; therefore handlers of commands are idempotent. `may_repeat` is called before each repetition
        (a budget); if it returns False, the command only goes on waiting. With `while_heard` the deadline is
        in heard time (`pulse`), which stops while the bus is away or stands still; for callers that take
        silence for death. With `moving` the deadline is `deadline_s` after the last reported progress
        (`bus.wire.request_progress`) of this command, or of another one with the same `moving`.

        Raises:
            DmscError: whatever the service raised.
            NoResponders: nobody listened before the deadline.
            DeadlineExceeded: there was no answer before the deadline.
            BusUnreachable: disconnected at the deadline.
        """
        subject = row(**tokens)
        most_pause_s = REPEAT_MOST_S if moving is None else min(REPEAT_MOST_S, deadline_s / 4)
        counted = 0  # of the progress reported to this command
        so_far = began = moving.so_far if moving else 0
        clock: Callable[[], float] = time.monotonic
        deadline = clock() + deadline_s
        data = await self._sealer.encode(row, message, cause, seal_to, deadline_s)
        pause = REPEAT_FIRST_S
        first = True
        with ExitStack() as stack:
            request = self.connection.question(subject, data, answerer=row.answerer(tokens), patient=True)
            inbox, pending = stack.enter_context(request)
            while True:
                if self.connected and (first or may_repeat is None or may_repeat()):
                    # Only repetitions: one header makes publishing 3.5 times slower.
                    headers = {WANTED: "1"} if moving is not None and not first else None
                    first = False
                    with suppress(BusUnreachable):  # lost this very moment: wait for its return
                        await self.connection.send(subject, data, reply=inbox, headers=headers)
                left = deadline - clock()
                if left <= 0:
                    break
                back = self.connection.back
                events: set[asyncio.Future[Any]] = {pending.answer, back}
                await asyncio.wait(events, timeout=min(pause, left), return_when=asyncio.FIRST_COMPLETED)
                if pending.answer.done():
                    return await self.answer_of(row, subject, pending.answer.result().data)
                if moving is not None:
                    moving.moved(pending.so_far - counted)
                    counted = pending.so_far
                    if moving.so_far > so_far:
                        so_far, deadline = moving.so_far, clock() + deadline_s
                if while_heard and clock is time.monotonic:  # most are answered before that is worth it
                    left = deadline - clock()
                    clock = stack.enter_context(self.pulse.held()).now
                    deadline = clock() + left
                if self.connected:
                    self.counters.repeats += 1
                    # After a reconnect the service may be a moment behind us: begin again with short pauses.
                    pause = REPEAT_FIRST_S if back.done() else min(pause * 2, most_pause_s)
            if not self.connected:
                raise self.connection.unreachable()
            if pending.unheard:
                raise NoResponders(f"nobody listened on {subject} for {deadline_s:g} s", subject=subject)
        if so_far > began:
            raise DeadlineExceeded(f"no progress on {subject} for {deadline_s:g} s", subject=subject)
        raise DeadlineExceeded(f"no answer on {subject} within {deadline_s:g} s", subject=subject)

    async def answer_of(self, row: Subject[Request, Reply], subject: str, data: bytes) -> Reply:
        """The decoded answer to a request on `subject`.

        Raises:
            DmscError: the error that the service raised; it is marked as `answered`.
            BadMessage: the answer can't be read, or is no answer of this row; or it is larger than answers of
                the row may be, and then it is dead-lettered unread.
        """
        try:
            codec.refuse_oversized_answer(row, data)
        except BadMessage as error:
            await dead_letter(self, row, subject, data, error)
            raise
        message = codec.decode_answer(data)
        if isinstance(message, ErrorReply):
            answered = message.to_exception()
            answered.answered = True
            raise answered
        if row.reply is None or not isinstance(message, (row.reply, *row.other_replies)):
            raise BadMessage(
                f"{message.wire_type} is no answer to {row.name}", reason="wrong type", subject=subject
            )
        return cast(Reply, message)

    async def subscribe(
        self,
        row: Subject,
        handler: Handler,
        *,
        concurrency: int = 1,
        queue_group: str | None = None,
        pending_limit: int = 65_536,
        ignored: str | None = None,
        on_unusable: OnUnusable | None = None,
        **tokens: Any,
    ) -> Subscription:
        """Calls `handler(message, envelope)` for each message; tokens that are not given match anything.

        Messages on the subject `ignored` are not even read: a service's own messages may be large. With
        `concurrency` 1 the order is kept. `on_unusable(subject, error)` is told of each message that was
        dead-lettered. On return, the server has the subscription.

        Raises:
            Refused: this identity may not subscribe there.
        """
        subscription = Subscription(
            self,
            row,
            row.wildcard(**tokens),
            handler=handler,
            concurrency=concurrency,
            queue_group=queue_group,
            pending_limit=pending_limit,
            ignored=ignored,
            on_unusable=on_unusable,
        )
        return await self.listen(subscription)

    async def serve(
        self,
        row: Subject,
        handler: Server,
        *,
        concurrency: int = 64,
        queue_group: str | None = None,
        pending_limit: int = 65_536,
        **tokens: Any,
    ) -> Subscription:
        """Answers requests and commands with what `handler(message, envelope)` returns or raises.

        A `DmscError` reaches the asker as the same class; any other exception is logged here and reaches the
        asker as `internal`, without details. Within 60 s the same envelope id never runs the handler twice.

        Raises:
            Refused: this identity may not subscribe there.
        """
        subscription = Subscription(
            self,
            row,
            row.wildcard(**tokens),
            server=handler,
            concurrency=concurrency,
            queue_group=queue_group,
            pending_limit=pending_limit,
        )
        return await self.listen(subscription)

    async def serve_batches(
        self,
        row: Subject,
        handler: BatchHandler,
        *,
        most: int = 256,
        concurrency: int = 8,
        pending_limit: int = 65_536,
        **tokens: Any,
    ) -> Subscription:
        """Like `serve`, for a handler that takes up to `most` pairs of message and envelope together.

        It returns an answer or an error for each, in the same order. What it raises reaches all askers.
        """
        subscription = BatchSubscription(
            self,
            row,
            row.wildcard(**tokens),
            server=handler,
            most=most,
            concurrency=concurrency,
            pending_limit=pending_limit,
        )
        return await self.listen(subscription)

    async def listen(self, subscription: Subscription) -> Subscription:
        """Starts a subscription, also one that the caller has made; it ends with this connection."""
        await subscription.start()
        self._subscriptions.add(subscription)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    # --- streams, buckets, objects --------------------------------------------------------------------------

    def bucket(self, row: Subject) -> Bucket:
        """The key-value bucket of a row."""
        return Bucket(self, row)

    @property
    def objects(self) -> ObjectStore:
        """The store of large objects: weights, checkpoints, datasets."""
        if self._objects is None:
            self._objects = ObjectStore(self.connection, streams.OBJECT_BUCKET)
        return self._objects

    async def provision(self, *, replicas: int = 1) -> None:
        """Makes or adjusts all streams, buckets and stores, and repeats that after each reconnect.

        The repetition is needed because a restarted server has lost what it kept in memory (the rendezvous).
        """
        await streams.provision(self.connection, replicas=replicas)
        if self._provisioned is None:
            self.on_reconnect(lambda: streams.provision(self.connection, replicas=self._provisioned or 1))
            keeping = streams.keep_provisioned(self.connection, replicas=replicas)
            self.connection.spawn(keeping, "keep streams provisioned")
        self._provisioned = replicas

    # --- the connection ------------------------------------------------------------------------------------

    async def barrier(self) -> None:
        """Waits until everything that was published so far has reached the server."""
        await self.connection.barrier()

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Calls `callback` after each reconnect, in its own task; returns a function that removes it."""
        self.connection.on_reconnect.append(callback)

        def remove() -> None:
            with suppress(ValueError):
                self.connection.on_reconnect.remove(callback)

        return remove
