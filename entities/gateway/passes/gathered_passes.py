"""Requests to the same instances in one message (ADR-0187).

A message costs the bus, the gateway and the instance more than a small model takes to compute. A request goes
at once while none like it is under way. Those that come meanwhile wait for each other, a few milliseconds at
most: the instance would have them wait as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from bus.tasks import TaskSet
from schemas.errors import DmscError, ErrorReply, Unavailable
from schemas.services.prediction import Predict, Predicted, PredictedItem, PredictItem
from schemas.step import Member


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheringConfig:
    """How many requests travel together."""

    window_s: float = 0.004
    """The first of a message waits at most so long for others, while a message is under way. Longer: fewer
    messages, later answers where the model is faster than that."""
    most: int = 32
    """Requests in a message."""
    most_bytes: int = 128 << 10
    """Bytes of all tensors of a message. A request with more than half of them travels alone."""


@dataclass(eq=False, slots=True)
class _Waiting:
    item: PredictItem
    size: int
    until: float
    """Its own deadline, by the event loop's clock."""
    answer: asyncio.Future[Predicted]
    message: _Message | None = None


@dataclass(eq=False, slots=True)
class _Message:
    requests: Sequence[_Waiting]
    task: asyncio.Task[None]


@dataclass(eq=False, slots=True)
class _SharedPath:
    """Requests that may travel together: to the same instances, with tensors of the same shapes."""

    job: str
    path: tuple[Member, ...]
    most: int
    waiting: list[_Waiting] = field(default_factory=list)
    size: int = 0
    under_way: int = 0
    timer: asyncio.Handle | None = None


class GatheredPasses:
    """Asks instances for single passes.

    Args:
        bus: The connection.
        deadline_s: How long one request may take, seconds.
        config: How many travel together.
    """

    def __init__(self, bus: Bus, deadline_s: float, config: GatheringConfig = GatheringConfig()) -> None:
        self._bus, self._deadline_s, self._config = bus, deadline_s, config
        self._lanes: dict[Hashable, _SharedPath] = {}
        self._tasks = TaskSet()

    async def ask(self, job: str, path: tuple[Member, ...], item: PredictItem) -> Predicted:
        """What the instances on the path answer.

        Raises:
            DmscError: What they raise for this request.
            Unavailable: They don't answer in time.
        """
        loop = asyncio.get_running_loop()
        size = sum(len(tensor.data) for tensor in item.inputs)
        request = _Waiting(item, size, loop.time() + self._deadline_s, loop.create_future())
        if 2 * size > self._config.most_bytes:
            return await self._command(job, path, [request])
        self._take(job, path, request)
        try:
            return await request.answer
        finally:
            message = request.message
            if message is not None and all(each.answer.done() for each in message.requests):
                message.task.cancel()  # nobody waits for it any more, or it is over

    def _take(self, job: str, path: tuple[Member, ...], request: _Waiting) -> None:
        shapes = tuple((tensor.name, tensor.dtype, tensor.shape) for tensor in request.item.inputs)
        key = (job, path, request.item.embed, shapes)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _SharedPath(job, path, self._config.most)
        if lane.size + request.size > self._config.most_bytes:
            self._send(key, lane)
        lane.waiting.append(request)
        lane.size += request.size
        if len(lane.waiting) >= lane.most:
            self._send(key, lane)
        elif lane.timer is None:
            loop = asyncio.get_running_loop()
            if lane.under_way:
                lane.timer = loop.call_later(self._config.window_s, self._send, key, lane)
            else:  # with those of the same turn of the loop
                lane.timer = loop.call_soon(self._send, key, lane)

    def _send(self, key: Hashable, lane: _SharedPath) -> None:
        if lane.timer is not None:
            lane.timer.cancel()
        requests = [each for each in lane.waiting if not each.answer.done()]
        lane.waiting, lane.size, lane.timer = [], 0, None
        if requests:
            lane.under_way += 1
            task = self._tasks.create(self._carry(key, lane, requests))
            message = _Message(requests, task)
            for each in requests:
                each.message = message
        elif not lane.under_way:
            self._lanes.pop(key, None)

    async def _carry(self, key: Hashable, lane: _SharedPath, requests: Sequence[_Waiting]) -> None:
        try:
            unanswered = await self._exchange(lane, requests)
        finally:
            lane.under_way -= 1
            self._send(key, lane)
        for each in unanswered:
            if not each.answer.done():
                each.message = _Message([each], self._tasks.create(self._ask_alone(lane, each)))

    async def _exchange(self, lane: _SharedPath, requests: Sequence[_Waiting]) -> Sequence[_Waiting]:
        """Sends a message and hands out its answers. Returns requests without one, which are to go alone."""
        try:
            first = await self._command(lane.job, lane.path, requests)
        except DmscError as error:
            # An instance of a former version knows of the first one alone; or one of them breaks its handler.
            if len(requests) > 1 and not isinstance(error, Unavailable):
                return requests
            for each in requests:
                _fail(each, error.to_reply(), error.answered)
            return ()
        head, *others = requests
        if first.error is None:
            _answer(head, first)
        else:
            _fail(head, first.error)
        for request, answer in zip(others, first.others, strict=False):
            _answer_item(request, answer, first)
        rest = others[len(first.others) :]
        if rest:  # answers are large, or an instance of a former version has read the first request alone
            lane.most = len(requests) - len(rest)
        return rest

    async def _ask_alone(self, lane: _SharedPath, request: _Waiting) -> None:
        try:
            _answer(request, await self._command(lane.job, lane.path, [request]))
        except DmscError as error:
            _fail(request, error.to_reply(), error.answered)

    async def _command(self, job: str, path: tuple[Member, ...], requests: Sequence[_Waiting]) -> Predicted:
        head, *others = (each.item for each in requests)
        order = Predict(
            job=job,
            generation=head.generation,
            path=path,
            inputs=head.inputs,
            embed=head.embed,
            others=tuple(others),
        )
        left_s = min(each.until for each in requests) - asyncio.get_running_loop().time()
        return await self._bus.command(
            subjects.PREDICT, order, deadline_s=max(left_s, 0.0), job=job, sid=path[0].sid
        )


def _answer(request: _Waiting, answer: Predicted) -> None:
    if not request.answer.done():
        request.answer.set_result(answer)


def _answer_item(request: _Waiting, item: PredictedItem, beside: Predicted) -> None:
    if item.error is not None:
        _fail(request, item.error)
        return
    _answer(
        request,
        Predicted(
            generation=item.generation,
            outputs=item.outputs,
            exact=item.exact,
            inexact_because=item.inexact_because,
            load=beside.load,
        ),
    )


def _fail(request: _Waiting, reply: ErrorReply, answered: bool = True) -> None:
    """Each request gets an error of its own: tracebacks are added to those that are raised."""
    if not request.answer.done():
        error = reply.to_exception()
        error.answered = answered
        request.answer.set_exception(error)
