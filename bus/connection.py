"""The bus as every service sees it: publish, request, command, subscribe, serve, append, history, buckets."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from typing import Any, cast

from nats.aio.client import Client

from bus.guard.brokered_jetstream import BrokeredJetStream, callers
from bus.messaging import streams
from bus.messaging.batch_handlers import BatchHandler, BatchSubscription
from bus.messaging.dead_letters import dead_letter
from bus.messaging.disconnects import connection_name
from bus.messaging.handlers import Handler, Server, Subscription
from bus.messaging.key_value import Bucket
from bus.messaging.object_store import ObjectStore
from bus.messaging.port import BusCounters
from bus.messaging.sealed_requests import RequestSealer
from bus.messaging.streams import StreamRecord
from bus.nats.client import NatsConnection
from bus.nats.dialer import Token, inbox_prefix
from bus.nats.liveness import BusLiveness
from bus.security.sealing import Keyring
from bus.subject import Reply, Request, Subject
from bus.wire import codec
from bus.wire.packed import Sendable
from bus.wire.request_progress import WANTED, RequestProgress
from schemas.base import Message
from schemas.envelope import EntityKind, Envelope, Sender
from schemas.errors import BadInput, BadMessage, BusUnreachable, DeadlineExceeded, ErrorReply, NoResponders

TURN_S = 0.005
"""Publishing never waits by itself: lest a tight loop starve the heartbeats, others run this often."""
KNOWN_SUBJECTS = 4_096
"""Concrete subjects that are not put together again at each publish."""
REPEAT_FIRST_S, REPEAT_MOST_S = 0.2, 2.0
"""Pause before a command is repeated: doubling between these; at once after a reconnect."""


class Bus:
    """One service's connection. `async with Bus.connect(url, name=…, kind=…) as bus:`.

    While the bus is away: `publish` is kept in a bounded buffer (16 MiB) and sent on return, beyond it
    raises `BusUnreachable`; `request`, key-value and `append` calls in flight fail or repeat at once;
    `command` and `append` wait and repeat; subscriptions come back by themselves.
    """

    def __init__(self, link: NatsConnection, sender: Sender) -> None:
        self.sender = sender
        self.metrics_url = ""  # where this process tells its metrics, for its registrations
        self.counters = BusCounters(_link=link)
        self.link = link
        self.sender_map = codec.sender_map(sender)
        self._ids = itertools.count(1)
        self._turn_ends = 0.0
        self._subscriptions: set[Subscription] = set()
        self._known_subjects: dict[tuple[Any, ...], str] = {}
        self._objects: ObjectStore | None = None
        self.pulse = BusLiveness(link)
        self._sealer = RequestSealer(self, None)
        self._provisioned: int | None = None
        self.unreadable: set[tuple[str, int]] = set()
        """Values in buckets that were kept already: subject and revision."""
        self.unreadable_bytes = 0
        """Of those that are still on their way to be kept."""

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
    ) -> AsyncIterator[Bus]:
        """Connects, and closes at the end of the block.

        Args:
            servers: One URL or several of one cluster, `nats://host:port`.
            name: The service's SID; survives restarts.
            kind: What the service is.
            token: A credential or a mesh's root (`bus.security.credentials`), a user's token, or, of a server
                without a guard, a token or `user:password`; or a function, called at each dial.
            incarnation: Does not survive restarts; random by default.
            connect_timeout_s: How long to try.

        Raises:
            BusUnreachable: nothing answers at `servers`.
            Refused: the bus does not accept `token`.
        """
        urls = [servers] if isinstance(servers, str) else list(servers)
        if not urls:
            raise BadInput("no bus address given: pass nats://host:port")
        sender = Sender(name=name, kind=kind, incarnation=incarnation or secrets.token_hex(4))
        label = connection_name(sender)
        link = NatsConnection(
            urls, name=name, label=label, token=token, inbox_prefix=inbox_prefix(name, kind, token), kind=kind
        )
        await link.open(connect_timeout_s)
        bus = cls(link, sender)
        bus._sealer = RequestSealer(bus, token)
        as_whom = callers(token, name, kind, nonce=link.wants_signatures)
        if as_whom:
            link.broker = BrokeredJetStream(link, sender, bus.next_id, as_whom)
        try:
            yield bus
        finally:
            await bus.close()

    def beside(self, *, name: str, kind: EntityKind, token: Token | None) -> AbstractAsyncContextManager[Bus]:
        """Another connection to the same servers, as somebody else; see `connect`."""
        return Bus.connect(self.link.servers, name=name, kind=kind, token=token)

    async def close(self) -> None:
        """Ends all subscriptions and the connection, in whatever state it is; twice is fine."""
        stopping = [subscription.stop(drain=False) for subscription in list(self._subscriptions)]
        await asyncio.gather(*stopping, return_exceptions=True)
        await self.link.close()

    @property
    def connected(self) -> bool:
        return self.link.online.is_set()

    @property
    def raw(self) -> Client:
        """The NATS client; only for use inside `bus/`. A lost credential replaces it: do not keep it."""
        return self.link.client

    @property
    def max_payload_bytes(self) -> int:
        return min(int(self.link.client.max_payload), codec.MAX_MESSAGE_BYTES)

    @property
    def keyring(self) -> Keyring:
        """What secrets are sealed and opened with."""
        return self._sealer.keyring

    # --- one-way and two-way -------------------------------------------------------------------------------

    def next_id(self) -> str:
        """Unique per incarnation, and the incarnation is in it."""
        return f"{self.sender.incarnation}-{next(self._ids)}"

    def _subject(self, row: Subject, tokens: dict[str, Any]) -> str:
        """The concrete subject; services use few of them, again and again."""
        key = (row.name, *tokens.items())
        known = self._known_subjects.get(key)
        if known is None:
            if len(self._known_subjects) >= KNOWN_SUBJECTS:
                self._known_subjects.clear()
            known = self._known_subjects[key] = row(**tokens)
        return known

    @staticmethod
    def cause_id(cause: Envelope | str | None) -> str | None:
        """What a caller names as the cause; left to `codec.encode` (the message being handled) where none."""
        return cause.id if isinstance(cause, Envelope) else cause

    async def publish(
        self, row: Subject, message: Sendable, *, cause: Envelope | str | None = None, **tokens: Any
    ) -> str:
        """Sends at most once; returns the envelope's id.

        Raises:
            BusUnreachable: away for so long that the buffer is full.
            BadMessage: too large, or a token that is none.
        """
        envelope_id = self.next_id()
        data = codec.encode(message, self.sender_map, envelope_id, self.cause_id(cause))
        await self.link.send(self._subject(row, tokens), data)
        now = time.monotonic()
        if now > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.monotonic() + TURN_S
        return envelope_id

    async def request(
        self,
        row: Subject[Request, Reply],
        message: Request,
        *,
        timeout_s: float = 5.0,
        repeat_s: float | None = None,
        cause: Envelope | str | None = None,
        seal_to: str = "",
        **tokens: Any,
    ) -> Reply:
        """Asks once, or every `repeat_s` under one envelope id, and returns the answer, a `Message` (usually
        of the row's `reply`).

        Raises:
            DmscError: whatever the service raised, as the same class.
            NoResponders, DeadlineExceeded, BusUnreachable, Refused: see `NatsConnection.ask`.
        """
        data = await self._sealer.encode(row, message, cause, seal_to, timeout_s)
        subject = self._subject(row, tokens)
        reply = await self.link.ask(
            subject, data, timeout_s=timeout_s, repeat_s=repeat_s, answerer=row.answerer(tokens)
        )
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
        """Asks again and again, under one envelope id, until answered: survives lost messages and restarts.

        The service runs the handler once per id (`serve` remembers), unless it was itself restarted in
        between; handlers of commands are idempotent for that reason. `may_repeat` is asked before each
        repetition (a budget); without its leave the answer is waited for a while longer. With `while_heard`
        the deadline is in heard time (`pulse`): for whoever takes silence for death. It never passes while
        the bus is away or stands still. With `moving` it is `deadline_s` behind the last progress that this
        service, or that of another command with the same `moving`, has told
        (`bus.wire.request_progress`): work that goes on has all the time that it takes.

        Raises:
            DmscError: whatever the service raised.
            NoResponders: nobody listened up to the deadline.
            DeadlineExceeded: no answer up to the deadline.
        """
        subject = row(**tokens)
        most_pause_s = REPEAT_MOST_S if moving is None else min(REPEAT_MOST_S, deadline_s / 4)
        told = 0
        so_far = began = moving.so_far if moving else 0
        clock: Callable[[], float] = time.monotonic
        deadline = clock() + deadline_s
        data = await self._sealer.encode(row, message, cause, seal_to, deadline_s)
        pause = REPEAT_FIRST_S
        first = True
        with ExitStack() as held:
            question = self.link.question(subject, data, answerer=row.answerer(tokens), patient=True)
            inbox, asked = held.enter_context(question)
            while True:
                if self.connected and (first or may_repeat is None or may_repeat()):
                    # Only repetitions: one header makes publishing 3.5 times slower.
                    headers = {WANTED: "1"} if moving is not None and not first else None
                    first = False
                    with suppress(BusUnreachable):  # lost this very moment: wait for its return
                        await self.link.send(subject, data, reply=inbox, headers=headers)
                left = deadline - clock()
                if left <= 0:
                    break
                back = self.link.back
                events: set[asyncio.Future[Any]] = {asked.answer, back}
                await asyncio.wait(events, timeout=min(pause, left), return_when=asyncio.FIRST_COMPLETED)
                if asked.answer.done():
                    return await self.answer_of(row, subject, asked.answer.result().data)
                if moving is not None:
                    moving.moved(asked.so_far - told)
                    told = asked.so_far
                    if moving.so_far > so_far:
                        so_far, deadline = moving.so_far, clock() + deadline_s
                if while_heard and clock is time.monotonic:  # most are answered before that is worth it
                    left = deadline - clock()
                    clock = held.enter_context(self.pulse.held()).now
                    deadline = clock() + left
                if self.connected:
                    self.counters.repeats += 1
                    # After a reconnect the service may be a moment behind us: begin again with short pauses.
                    pause = REPEAT_FIRST_S if back.done() else min(pause * 2, most_pause_s)
            if not self.connected:
                raise self.link.unreachable()
            if asked.unheard:
                raise NoResponders(f"nobody listened on {subject} for {deadline_s:g} s", subject=subject)
        if so_far > began:
            raise DeadlineExceeded(f"no progress on {subject} for {deadline_s:g} s", subject=subject)
        raise DeadlineExceeded(f"no answer on {subject} within {deadline_s:g} s", subject=subject)

    async def answer_of(self, row: Subject[Request, Reply], subject: str, data: bytes) -> Reply:
        """What was answered to a request on `subject`.

        Raises:
            DmscError: what the service raised; it is marked as `answered`.
            BadMessage: it can't be read, or is no answer of this row; or it is larger than answers of the
                row may be: then nothing of it was read, and it is a dead letter.
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
        **tokens: Any,
    ) -> Subscription:
        """Calls `handler(message, envelope)` for each message; tokens not given match anything.

        What comes on the subject `ignored` is not even read: what one says oneself may be large.
        With `concurrency` 1 the order is kept. The subscription stands at the server on return.

        Raises:
            Refused: this identity may not listen there.
        """
        return await self._listen(
            row,
            tokens,
            handler=handler,
            server=None,
            concurrency=concurrency,
            queue_group=queue_group,
            pending_limit=pending_limit,
            ignored=ignored,
        )

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

        A `DmscError` reaches the asker as the same class; anything else is logged here and reaches it
        as `internal`, without details. The same envelope id never runs the handler twice (60 s).

        Raises:
            Refused: this identity may not listen there.
        """
        return await self._listen(
            row,
            tokens,
            handler=None,
            server=handler,
            concurrency=concurrency,
            queue_group=queue_group,
            pending_limit=pending_limit,
        )

    async def serve_lots(
        self,
        row: Subject,
        handler: BatchHandler,
        *,
        most: int = 256,
        concurrency: int = 8,
        pending_limit: int = 65_536,
        **tokens: Any,
    ) -> Subscription:
        """As `serve`, for a handler that takes up to `most` messages together: a list of (message, envelope).
        It returns, in their order, answers or errors. What it raises reaches all.
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
        return await self._started(subscription)

    async def _listen(self, row: Subject, tokens: dict[str, Any], **options: Any) -> Subscription:
        return await self._started(Subscription(self, row, row.wildcard(**tokens), **options))

    async def listen(self, subscription: Subscription) -> None:
        """Starts a subscription that was made elsewhere; it ends with this connection."""
        await self._started(subscription)

    async def _started(self, subscription: Subscription) -> Subscription:
        await subscription.start()
        self._subscriptions.add(subscription)
        return subscription

    def forget(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)

    # --- what is kept ---------------------------------------------------------------------------------------

    async def append(
        self,
        row: Subject,
        message: Message,
        *,
        message_id: str | None = None,
        cause: Envelope | str | None = None,
        deadline_s: float = 30.0,
        **tokens: Any,
    ) -> int:
        """Appends to the row's stream, repeating until acknowledged; returns the sequence.

        The deadline is in heard time (`pulse`): it does not pass while the bus is away or stands still.
        The same `message_id` (by default the envelope's) is stored once within two minutes.
        """
        return await streams.append(
            self, row, message, message_id=message_id, cause=cause, deadline_s=deadline_s, tokens=tokens
        )

    async def append_behind(
        self, row: Subject, message: Message, *, message_id: str, last: int, **tokens: Any
    ) -> int:
        """Compare-and-set on the row's stream: appends if `last` is still its last sequence."""
        return await streams.append_behind(
            self, row, message, message_id=message_id, last=last, tokens=tokens
        )

    async def last_sequence(self, row: Subject) -> int:
        """The last sequence of the row's stream; 0: there was no message yet."""
        return await streams.last_sequence(self, row)

    async def tail(self, row: Subject) -> tuple[int, StreamRecord | None]:
        """The last sequence of the row's stream (0: none), and the message there; None: it was removed."""
        return await streams.tail(self, row)

    def history(
        self,
        row: Subject,
        *,
        start: int = 1,
        since: float | None = None,
        follow: bool = False,
        **tokens: Any,
    ) -> AsyncGenerator[StreamRecord, None]:
        """The row's stream from sequence `start`, in order; with `follow` also what comes, for ever.

        `since`, instead of `start`: what the server stored from then on, seconds since the epoch.
        """
        return streams.history(self, row, start=start, since=since, follow=follow, tokens=tokens)

    def bucket(self, row: Subject) -> Bucket:
        """The key-value bucket of a row."""
        return Bucket(self, row)

    @property
    def objects(self) -> ObjectStore:
        """Large things: weights, checkpoints, datasets."""
        if self._objects is None:
            self._objects = ObjectStore(self.link, streams.OBJECT_BUCKET)
        return self._objects

    async def provision(self, *, replicas: int = 1) -> None:
        """Makes or adjusts all streams, buckets and stores; again after a reconnect.

        A restarted server has lost what lives in memory (the rendezvous), hence the repetition.
        """
        await streams.provision(self.link, replicas=replicas)
        if self._provisioned is None:
            self.on_reconnect(self._provision_again)
            keeping = streams.keep_provisioned(self.link, replicas=replicas)
            self.link.spawn(keeping, "keep streams provisioned")
        self._provisioned = replicas

    async def _provision_again(self) -> None:
        await streams.provision(self.link, replicas=self._provisioned or 1)

    # --- the connection ------------------------------------------------------------------------------------

    async def barrier(self) -> None:
        """Everything that was published so far has reached the server."""
        await self.link.barrier()

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Calls back after each reconnect, in a task of its own. Returns what takes the callback away."""
        self.link.on_reconnect.append(callback)

        def remove() -> None:
            with suppress(ValueError):
                self.link.on_reconnect.remove(callback)

        return remove
