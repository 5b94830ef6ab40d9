"""Subscriptions and servers: bounded queues and concurrency, each command handled once, drain at the end."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from nats.aio.msg import Msg

from bus.logs import get_logger
from bus.messaging import attribution
from bus.messaging.dead_letters import dead_letter
from bus.messaging.port import BusPort
from bus.nats import reply_subjects
from bus.nats.client import asked_to_end
from bus.nats.durable_subscription import DurableSubscription
from bus.subject_row import Subject
from bus.tasks import TaskSet
from bus.wire import codec
from bus.wire.correlation import handling
from bus.wire.packed import Sendable
from bus.wire.request_progress import SO_FAR, WANTED, RequestProgress, present
from schemas.base import Message
from schemas.envelope import Envelope
from schemas.errors import BadMessage, DmscError, ErrorReply
from schemas.limits import REMEMBERED_S

log = get_logger("bus.messaging.handlers")

P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[Any, Envelope], Awaitable[None]]
OnUnusable = Callable[[str, BadMessage], None]
Server = Callable[[Any, Envelope], Awaitable[Sendable]]

REMEMBERED_CALLS = 4_096
REMEMBERED_BYTES = 32 << 20


Call = tuple[str, ...]
"""Identifies a request: asker, digest of the request, incarnation, envelope id. Another request under a known
id has another digest, so it counts as new."""


@dataclass(slots=True)
class _Remembered:
    at: float
    reply: bytes


@dataclass(slots=True)
class _Running:
    waiting: set[str]
    progress: RequestProgress = field(default_factory=RequestProgress)


@dataclass(slots=True)
class ReplyCache:
    """The running and answered requests of one subscription, so that a repeated request runs nothing twice.

    Running requests are never forgotten. Answers are, after REMEMBERED_S or when there are too many.
    """

    running: dict[Call, _Running] = field(default_factory=dict)
    answered: OrderedDict[Call, _Remembered] = field(default_factory=OrderedDict)
    size: int = 0

    def admit(self, call: Call, inbox: str, now: float) -> bytes | bool:
        """Decides what to do with a request.

        Returns:
            True: it is new, run it. False: it is running, and the inbox will get the answer. Bytes: the
            answer.
        """
        answer = self.answered.get(call)
        if answer is not None and now - answer.at <= REMEMBERED_S:
            return answer.reply
        running = self.running.get(call)
        if running is not None:
            running.waiting.add(inbox)
            return False
        self.running[call] = _Running({inbox})
        return True

    def progress(self, call: Call) -> RequestProgress:
        """The progress of a running request."""
        return self.running[call].progress

    def settle(self, call: Call, reply: bytes | None, now: float) -> set[str]:
        """Ends a request and returns the inboxes that wait for its answer.

        `reply` None means that it was interrupted and may run again.
        """
        running = self.running.pop(call, None)
        if reply is not None:
            expired = self.answered.pop(call, None)
            self.size += len(reply) - (len(expired.reply) if expired else 0)
            self.answered[call] = _Remembered(now, reply)
            self._forget(now)
        return running.waiting if running else set()

    def _forget(self, now: float) -> None:
        while self.answered:
            oldest = next(iter(self.answered))
            entry = self.answered[oldest]
            crowded = len(self.answered) > REMEMBERED_CALLS or self.size > REMEMBERED_BYTES
            if not crowded and now - entry.at <= REMEMBERED_S:
                return
            del self.answered[oldest]
            self.size -= len(entry.reply)


class Subscription:
    """A subscription to one row, made by `Bus.subscribe` and `Bus.serve`.

    Up to `concurrency` workers, started when needed, take messages from one queue; with one worker the order
    is kept. Beyond `pending_limit` waiting messages the newest are dropped and counted (`dropped` and
    `Bus.counters.dropped`). Messages on the subject `ignored` are not read.
    """

    def __init__(
        self,
        bus: BusPort,
        row: Subject,
        subject: str,
        *,
        handler: Handler | None = None,
        server: Server | None = None,
        concurrency: int,
        queue_group: str | None = None,
        pending_limit: int,
        ignored: str | None = None,
        on_unusable: OnUnusable | None = None,
    ) -> None:
        self.row = row
        self.subject = subject
        self.dropped = 0
        self._bus = bus
        self._handle: Callable[[Msg], Awaitable[None]]
        if server is not None:
            self._handle = functools.partial(self._serve, server)
        elif handler is not None:
            self._handle = functools.partial(self._handle_message, handler)
        self._concurrency = max(1, concurrency)
        self._queue_group = queue_group or ""
        self._pending_limit = pending_limit
        self._ignored = ignored
        self._on_unusable = on_unusable
        self._memory = ReplyCache()
        check = attribution.check_of(row)
        # On an unguarded bus, a subject does not prove who its sender is.
        self._check_names = check if check is not None and bus.connection.guarded else None
        self._subscription: DurableSubscription | None = None
        self._workers = TaskSet()
        self._idle = 0
        self._stopped: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.connection.subscribe(
            self.subject,
            None,
            queue=self._queue_group,
            pending_limit=self._pending_limit,
            on_drop=self._on_drop,
        )
        self._start_worker(self._subscription)

    async def stop(self, drain: bool = True) -> None:
        """Stops listening. With `drain`, messages that have arrived are handled first. Idempotent.

        When called from one of its own handlers it returns at once, because it cannot wait for itself.
        """
        if self._stopped is None:
            self._stopped = asyncio.create_task(self._stop(drain), name=f"stop {self.subject}")
            self._stopped.add_done_callback(lambda task: task.cancelled() or task.exception())
        if asyncio.current_task() not in self._workers:
            await asyncio.shield(self._stopped)

    async def _stop(self, drain: bool) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            drain_s = self._bus.times.drain_s if drain else 0.0
            await self._bus.connection.unsubscribe(subscription, drain_s=drain_s)
        await self._workers.close()
        self._bus.forget(self)

    # --- workers -------------------------------------------------------------------------------------------

    def _start_worker(self, subscription: DurableSubscription) -> None:
        self._idle += 1
        self._workers.create(self._work(subscription), name=f"{self.subject} worker")

    async def _work(self, subscription: DurableSubscription) -> None:
        """Takes messages one after the other; one worker always waits, until `concurrency` are busy."""
        while True:
            try:
                await self._take(subscription)
            except asyncio.CancelledError:
                if asked_to_end():
                    raise
                self._failed(None)
            except Exception as error:
                self._failed(error)

    async def _take(self, subscription: DurableSubscription) -> None:
        raw = await subscription.messages.get()
        self._busy(subscription)
        try:
            await self._handle(raw)
        finally:
            self._idle += 1
            subscription.done(raw)

    def _busy(self, subscription: DurableSubscription) -> None:
        """Marks a worker as busy and starts another one if none waits any more."""
        self._idle -= 1
        if self._idle == 0 and len(self._workers) < self._concurrency:
            self._start_worker(subscription)

    def _on_drop(self) -> None:
        self._bus.counters.dropped += 1
        self.dropped += 1
        if self.dropped == 1:
            log.warning(
                "messages dropped: the handler is slower than the sender",
                subject=self.subject,
                limit=self._pending_limit,
                service=self._bus.sender.name,
            )

    # --- one message -------------------------------------------------------------------------------------

    async def _handle_message(self, handler: Handler, raw: Msg) -> None:
        if raw.subject == self._ignored:
            return
        try:
            if raw.reply or raw.headers:
                refuse_stored(raw)
            if len(raw.data) > codec.MOST_NOTICE_BYTES:
                codec.refuse_oversized(self.row, raw.data)
            message, envelope = codec.decode(raw.data, self.row.schema)
            if self._check_names is not None:
                self._check_names(raw.subject, message, envelope)
        except BadMessage as error:
            handling.set(None)
            await dead_letter(self._bus, self.row, raw.subject, raw.data, error)
            if self._on_unusable is not None:
                self._on_unusable(raw.subject, error)
            return
        handling.set(envelope)
        await handler(message, envelope)

    async def _serve(self, server: Server, raw: Msg) -> None:
        request = await self._new_request(raw)
        if isinstance(request, bytes):
            await self._reply({raw.reply}, request)
        elif request is not None:
            await self._answer(server, *request)

    async def _new_request(self, raw: Msg) -> tuple[Message, Envelope, Call] | bytes | None:
        """Reads a request; a repeated one gets its progress, or the answer of before.

        Returns:
            The message, its envelope and its call, to be handled; or the answer to send at once; or None if
            nothing is to be sent now.
        """
        request = await self._read_request(raw)
        if request is None or isinstance(request, bytes):
            return request
        call = request[2]
        admitted = self._memory.admit(call, raw.reply, time.monotonic())
        if admitted is True:
            return request
        if admitted is not False:
            return admitted
        if raw.headers and WANTED in raw.headers:
            await self._report_progress(raw.reply, self._memory.progress(call))
        return None

    async def _read_request(self, raw: Msg) -> tuple[Message, Envelope, Call] | bytes | None:
        """Reads a request.

        The reply subject is checked first, because the answer is published there with this service's rights.

        Returns:
            The message, its envelope and its call; or, if it can't be read, the error to answer; or None if
            nobody may be answered.
        """
        asker: reply_subjects.Requester | None = None
        try:
            refuse_stored(raw)
            asker = reply_subjects.asker_of(self.row, raw)
            codec.refuse_oversized(self.row, raw.data)
            message, envelope = codec.decode(self._bus.keyring.opened(self.row, raw.data), self.row.schema)
            if not asker.is_sender(envelope.sender, guarded=self._bus.connection.guarded):
                other_asker, asker = asker, None
                raise reply_subjects.another_sender(self.row, other_asker, envelope.sender)
            if self._check_names is not None:
                self._check_names(raw.subject, message, envelope)
        except BadMessage as error:
            handling.set(None)
            await dead_letter(self._bus, self.row, raw.subject, raw.data, error)
            return None if asker is None else self._encode(error.to_reply(), None)
        return message, envelope, (*asker, envelope.sender.incarnation, envelope.id)

    async def _answer(self, server: Server, message: Message, envelope: Envelope, call: Call) -> None:
        handling.set(envelope)
        present.set(self._memory.progress(call))
        outcome = await self._outcome((call,), server, message, envelope)
        reply = self._encode(outcome, envelope.id)
        await self._reply(self._memory.settle(call, reply, time.monotonic()), reply)

    async def _outcome(
        self, calls: Sequence[Call], server: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> T | ErrorReply:
        """What the handler of these calls returns, or the error that their askers get instead."""
        try:
            return await server(*args, **kwargs)
        except asyncio.CancelledError:
            if asked_to_end():
                # Interrupted by shutdown: without an answer, the askers repeat the requests to the successor.
                for call in calls:
                    self._memory.settle(call, None, time.monotonic())
                raise
            return internal("its work was cancelled")
        except DmscError as error:
            return error.to_reply()
        except Exception as error:
            self._failed(error)
            return internal("see its log")

    def _encode(self, message: Sendable, cause: str | None) -> bytes:
        bus = self._bus
        try:
            data = codec.encode(message, bus.sender_map, bus.next_id(), cause)
            codec.refuse_oversized_answer(self.row, data)
            return data
        except BadMessage as error:
            log.error("answer cannot be sent", subject=self.subject, error=error.text)
            failure = internal(error.text)
        except Exception as error:  # the handler returned no message
            self._failed(error)
            failure = internal("see its log")
        return codec.encode(failure, bus.sender_map, bus.next_id(), cause)

    async def _reply(self, waiting: set[str], reply: bytes) -> None:
        for inbox in waiting:
            try:
                await self._bus.connection.send(inbox, reply)
            except DmscError as error:  # the bus is away: the asker repeats, and gets the remembered answer
                log.debug("answer not sent", subject=self.subject, error=error.text)

    async def _report_progress(self, inbox: str, progress: RequestProgress) -> None:
        try:
            await self._bus.connection.send(inbox, b"", headers={SO_FAR: str(progress.so_far)})
        except DmscError as error:  # the bus is away: the asker asks again
            log.debug("progress not reported", subject=self.subject, error=error.text)

    def _failed(self, error: Exception | None) -> None:
        """Counts and logs a handler's failure; None stands for a CancelledError without a cancellation."""
        self._bus.counters.handler_errors += 1
        log.error(
            "handler failed" if error else "handler was cancelled from within",
            subject=self.subject,
            service=self._bus.sender.name,
            exc_info=error,
        )


def refuse_stored(raw: Msg) -> None:
    """Refuses a message that JetStream delivered from a stream.

    JetStream delivers stored messages to any subject that a reader names as its reply, without checking
    whether that reader may publish there (`bus.guard.permissions`). The marks of such a delivery can't be
    removed.

    Raises:
        BadMessage: the message was not published, but read from a stream.
    """
    if raw.reply.startswith("$JS.ACK.") or (raw.headers and "Nats-Stream" in raw.headers):
        raise BadMessage(f"{raw.subject}: a stored message, sent here by a reader", reason="replayed")


def internal(text: str) -> ErrorReply:
    return ErrorReply(code=DmscError.code, text=f"the service failed: {text}")
