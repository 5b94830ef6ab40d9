"""Answering many at a time: what has arrived on a subject is handled together, and answered in one piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from nats.aio.msg import Msg

from bus.logs import get_logger
from bus.messaging.handlers import Call, Subscription, internal
from bus.messaging.port import BusPort
from bus.nats.client import asked_to_end
from bus.nats.durable_subscription import DurableSubscription
from bus.nats.pipelined_publish import Outgoing, send_many
from bus.subject import Subject
from bus.wire.correlation import handling
from bus.wire.packed import Sendable
from schemas.envelope import Envelope
from schemas.errors import DmscError

log = get_logger("bus.messaging.handlers")

BatchHandler = Callable[[Sequence[tuple[Any, Envelope]]], Awaitable[Sequence[Sendable | DmscError]]]
"""Answers, or why there is none, in the order of the questions."""


class BatchSubscription(Subscription):
    """A listener whose workers take what has arrived, up to `most` messages, and answer them together.

    All else is as with `Subscription`: a repeated one runs nothing twice, one that can't be read is buried
    and answered, what a handler raises reaches those who asked. What is sent while a lot is handled names no
    message as its cause; the answers name theirs.
    """

    def __init__(
        self,
        bus: BusPort,
        row: Subject,
        subject: str,
        *,
        server: BatchHandler,
        most: int,
        concurrency: int,
        pending_limit: int,
    ) -> None:
        super().__init__(
            bus,
            row,
            subject,
            handler=None,
            server=None,
            concurrency=concurrency,
            queue_group=None,
            pending_limit=pending_limit,
        )
        self._server = server
        self._most = most

    async def _take(self, feed: DurableSubscription) -> None:
        lot = [await feed.messages.get()]
        while len(lot) < self._most and not feed.messages.empty():
            lot.append(feed.messages.get_nowait())
        self._busy(feed)
        try:
            await self._serve_lot(lot)
        finally:
            self._idle += 1
            for raw in lot:
                feed.done(raw)

    async def _serve_lot(self, lot: Sequence[Msg]) -> None:
        handling.set(None)
        questions: list[tuple[Any, Envelope]] = []
        calls: list[Call] = []
        replies: list[Outgoing] = []
        now = time.monotonic()
        for raw in lot:
            asked = await self._asked(raw)
            if asked is None:
                continue
            if isinstance(asked, bytes):
                replies.append(Outgoing(raw.reply, asked))
                continue
            message, envelope, call = asked
            admitted = self._memory.admit(call, raw.reply, now)
            if admitted is True:
                questions.append((message, envelope))
                calls.append(call)
            elif admitted is not False:
                replies.append(Outgoing(raw.reply, admitted))
        if questions:
            replies += await self._answers(questions, calls)
        try:
            await send_many(self._bus.link, replies)
        except DmscError as error:  # the bus is away: the askers repeat, and find the answers remembered
            log.debug("answers not sent", subject=self.subject, error=error.text)

    async def _answers(
        self, questions: Sequence[tuple[Any, Envelope]], calls: Sequence[Call]
    ) -> list[Outgoing]:
        answers: Sequence[Sendable | DmscError]
        try:
            answers = await self._server(questions)
        except asyncio.CancelledError:
            if asked_to_end():
                # Cut short by shutdown: no answer, so that the askers repeat it to whoever takes over.
                for call in calls:
                    self._memory.settle(call, None, time.monotonic())
                raise
            answers = [internal("its work was cancelled")] * len(questions)
        except DmscError as error:
            answers = [error] * len(questions)
        except Exception as error:
            self._failed(error)
            answers = [internal("see its log")] * len(questions)
        replies: list[Outgoing] = []
        now = time.monotonic()
        for (_, envelope), call, answer in zip(questions, calls, answers, strict=True):
            handling.set(envelope)
            told = answer.to_reply() if isinstance(answer, DmscError) else answer
            reply = self._encode(told, envelope.id)
            replies += [Outgoing(inbox, reply) for inbox in self._memory.settle(call, reply, now)]
        handling.set(None)
        return replies
