"""The broker's relay: reads a call, decides whether it may be made, makes it, and answers the asker's inbox.

Any number of brokers share a queue group. They keep no state that matters: a consumer's name says whose it
is, and its deliveries go straight to its asker's inbox. When a broker dies, its askers repeat their requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from typing import TYPE_CHECKING

from nats.aio.msg import Msg

from bus import subjects
from bus.broker.fair_queue import FairQueue
from bus.broker.job_objects import JobObjects
from bus.broker.quotas import BrokerQuotas
from bus.guard.broker_caller import BROKER, EVERY, BrokerCaller
from bus.guard.call_rights import ObjectNames, check, touches_objects
from bus.guard.jetstream_calls import STORES, AskStore, BrokerPublication, Call, Open, Write, parse
from bus.logs import get_logger
from bus.messaging.dead_letters import dead_letter
from bus.messaging.handlers import Subscription, refuse_stored
from bus.tasks import TaskSet
from bus.wire import codec
from schemas.base import Message
from schemas.broker import BrokerRequest
from schemas.errors import (
    BadInput,
    BadMessage,
    BusUnreachable,
    DeadlineExceeded,
    DmscError,
    NoResponders,
    RateLimited,
    Refused,
)

if TYPE_CHECKING:
    from bus.connection import Bus

log = get_logger("broker")

QUEUE_GROUP = "broker"
PENDING = 4_096
"""Most messages that wait in the subscription."""
REFUSED_CODE, UNHEARD_CODE, SLOW_CODE = 90_403, 90_503, 90_504
"""Error numbers of our own beside JetStream's: not allowed; no stream takes it; no answer in time."""
MESSAGE_ID = "Nats-Msg-Id"
TOLD_MOST = 100
"""How many refusals are logged one by one; after that, each hundredth is."""


class BrokerRelay(Subscription):
    """Serves all askers in turn.

    `asked` counts calls by the asker's kind, `refused` those that were not made.
    """

    def __init__(self, bus: Bus, *, answer_s: float = 10.0) -> None:
        super().__init__(
            bus,
            subjects.BROKER_REQUEST,
            f"{BROKER}.>",
            concurrency=1,
            queue_group=QUEUE_GROUP,
            pending_limit=PENDING,
        )
        self._requester = bus
        self._answer_s = answer_s
        self.asked: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.turns: FairQueue[tuple[BrokerCaller | None, Msg]] = FairQueue()
        self._quotas = BrokerQuotas()
        self._calls = TaskSet()
        self._jobs = JobObjects(bus)
        self._handle = self._enqueue

    async def _stop(self, drain: bool) -> None:
        await super()._stop(drain)
        if drain:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._bus.times.drain_s):
                    await self._calls.wait()
        await self._calls.close()

    async def _enqueue(self, raw: Msg) -> None:
        asker = BrokerCaller.of_subject(raw.subject)
        party = asker.party if asker else ""
        if self.turns.add(party, (asker, raw), len(raw.data)):
            self._start_calls()
            return
        self._bus.counters.dropped += 1
        if (dropped := self.turns.dropped[party]) == 1 or dropped % 10_000 == 0:
            log.warning("calls dropped: one asker has too many waiting", asker=raw.subject, dropped=dropped)

    def _start_calls(self) -> None:
        while (next_call := self.turns.take()) is not None:
            party, (asker, raw) = next_call
            self._calls.create(self._run_call(party, asker, raw), name=f"relay for {party}")

    async def _run_call(self, party: str, asker: BrokerCaller | None, raw: Msg) -> None:
        try:
            await self._relay(asker, raw)
        except Exception as error:
            self._failed(error)
        finally:
            self.turns.done(party)
            self._start_calls()

    async def _relay(self, asker: BrokerCaller | None, raw: Msg) -> None:
        answerable = False
        try:
            refuse_stored(raw)
            if asker is None or (raw.reply and not asker.may_be_answered_at(raw.reply)):
                raise BadMessage(f"{raw.subject}: the answer would not go to who asks", reason="reply")
            answerable = True
            codec.refuse_oversized(self.row, raw.data)
            request, _ = codec.decode(raw.data, BrokerRequest)
        except BadMessage as error:
            await dead_letter(self._bus, self.row, raw.subject, raw.data, error)
            if answerable:
                await self._answer_asker(raw.reply, failure(BadInput(error.text)))
            return
        assert isinstance(request, BrokerRequest)
        self.asked[asker.kind] += 1
        try:
            call = parse(request.call, request.headers, request.body)
            names = await self._jobs.names(asker) if touches_objects(call) else ObjectNames()
            user = await self._jobs.user_of(call.job) if isinstance(call, AskStore) else ""
            check(asker, call, names, user)
            await self._make_call(asker, call, raw.reply)
        except DmscError as error:
            self._log_refusal(asker, request.call, error)
            about_store = request.call.startswith(STORES)
            await self._answer_asker(
                raw.reply, self._encoded(error.to_reply()) if about_store else failure(error)
            )

    async def _make_call(self, asker: BrokerCaller, call: Call, reply: str) -> None:
        if isinstance(call, AskStore):
            with self._quotas.asking_store(call.job):
                rows = await self._requester.request(
                    subjects.STORE_QUERY, call.query, timeout_s=self._answer_s, job=call.job, sid=call.sid
                )
            await self._answer_asker(reply, self._encoded(rows))
            return
        if isinstance(call, Open):
            self._quotas.open_reader(asker.subject, time.monotonic())
        elif isinstance(call, Write) and asker.scope != EVERY and not call.subject.startswith("$O."):
            size = len(call.subject) + len(call.body)
            self._quotas.write_meeting_point(asker.scope, size, time.monotonic())
        connection, order = self._bus.connection, own(asker, call)
        headers = dict(order.headers) if order.headers else None
        if order.forwarded or not reply:
            await connection.send(order.subject, order.body, reply=reply, headers=headers)
            return
        answer = await connection.ask(order.subject, order.body, timeout_s=self._answer_s, headers=headers)
        await self._answer_asker(reply, answer.data, answer.headers)

    async def _answer_asker(self, reply: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        if not reply:
            return
        try:
            await self._bus.connection.send(reply, data, headers=headers)
        except DmscError as error:  # the bus is away: the asker asks again
            log.debug("answer not sent", error=error.text)

    def _encoded(self, message: Message) -> bytes:
        """A message in the form of a service's answer, for answers and errors of instances' stores."""
        return codec.encode(message, self._bus.sender_map, self._bus.next_id())

    def _log_refusal(self, asker: BrokerCaller, call: str, error: DmscError) -> None:
        if not isinstance(error, Refused | BadInput | RateLimited):
            return
        self.refused[asker.kind] += 1
        total = self.refused.total()
        if total <= TOLD_MOST or total % 100 == 0:
            log.warning(
                "call not made", asker=asker.subject, call=call[:200], reason=error.text[:200], refused=total
            )


def own(asker: BrokerCaller, call: Call) -> BrokerPublication:
    """The publication of a call; a message id gets the asker's prefix, so nobody can take another's id."""
    order = call.order
    if not isinstance(call, Write) or not order.headers or MESSAGE_ID not in order.headers:
        return order
    headers = {**order.headers, MESSAGE_ID: f"{asker.consumers}{order.headers[MESSAGE_ID]}"}
    return BrokerPublication(order.subject, order.body, headers)


def failure(error: DmscError) -> bytes:
    """The broker's refusal in the form of a JetStream error."""
    code, number = 500, 0
    if isinstance(error, Refused):
        code, number = 403, REFUSED_CODE
    elif isinstance(error, BadInput):
        code, number = 400, REFUSED_CODE
    elif isinstance(error, NoResponders):
        code, number = 503, UNHEARD_CODE
    elif isinstance(error, BusUnreachable | DeadlineExceeded | RateLimited):
        code, number = 503, SLOW_CODE
    text = {"code": code, "err_code": number, "description": error.text[:500]}
    return json.dumps({"error": text}).encode()
