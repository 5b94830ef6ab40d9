"""Asking the units before this one for samples, and answering the units behind it (ADR-0062).

What is asked, and of whom, `workers.transaction.pull_machine` decides. An answer is made on one thread, what
is needed first comes first; how often it is asked for changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from schemas.data_plane import HopLoad, MicrobatchNotice, RouteTable
from schemas.step import Member
from workers.data.preprocessing.records import Sample, packed, unpacked
from workers.links.offers import TensorTransfer
from workers.telemetry.load import Average
from workers.transaction.pull_machine import Key, Pull, PullMachine

Send = Callable[[TensorTransfer, Callable[[], bool]], Awaitable[bool]]
"""Delivers a transfer that is still needed; False: its receiver can't be reached."""
Start = Callable[[Coroutine[Any, Any, object]], object]
Made = TypeVar("Made")


class Workbench:
    """One thread that makes samples or batches, and how long it takes for one microbatch."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._queue: asyncio.PriorityQueue[tuple[tuple[bool, int, int], int, Any, Any]] = (
            asyncio.PriorityQueue()
        )
        self._number = 0
        self._closed = False
        self._average = Average()
        self.microbatches = 0
        self.busy_s = 0.0

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    @property
    def service_ms(self) -> float:
        """Milliseconds for one microbatch; 0: nothing was made yet."""
        return self._average.value

    async def run(self) -> None:
        """Works until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            _, _, work, done = await self._queue.get()
            if done.cancelled():
                continue
            began = time.perf_counter()
            try:
                made = await loop.run_in_executor(self._thread, work)
            except Exception as error:  # whoever waits for it gets it
                if not done.cancelled():
                    done.set_exception(error)
                continue
            took = time.perf_counter() - began
            self.busy_s += took
            self._average.add(1e3 * took)
            self.microbatches += 1
            if not done.cancelled():
                done.set_result(made)

    async def make(self, key: Key, work: Callable[[], Made]) -> Made:
        """The result of `work`, for a microbatch: of validations first, then by step."""
        done: asyncio.Future[Made] = asyncio.get_running_loop().create_future()
        self._number += 1
        await self._queue.put(((not key[0], *key[1:]), self._number, work, done))
        return await done

    def close(self, last: Callable[[], None]) -> None:
        """Ends the thread after the work in hand and `last`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._thread.submit(last)
            self._thread.shutdown(wait=False)


class Pulls:
    """What this unit asks for.

    Args:
        machine: Decides of whom.
        send: Sends a pull.
        start: Runs in the background.
    """

    def __init__(self, machine: PullMachine, send: Send, start: Start) -> None:
        self.machine = machine
        self._send = send
        self._start = start
        self._waiting: dict[Key, list[asyncio.Future[tuple[Tensor, int]]]] = {}

    async def get(self, key: Key) -> tuple[list[dict[str, Any]], int]:
        """The samples of a microbatch, from whoever has them first, and how many of them were replaced.

        Raises:
            BadData: See `unpacked`.
        """
        coming: asyncio.Future[tuple[Tensor, int]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(coming)
        self._run(self.machine.want(key, time.monotonic()))
        try:
            record, replaced = await coming
            return unpacked(record), replaced
        finally:
            waiting = self._waiting.get(key, [])
            if coming in waiting:
                waiting.remove(coming)
            if key in self._waiting and not waiting:
                del self._waiting[key]
                self._run(self.machine.unwant(key, time.monotonic()))

    async def look(self) -> None:
        """Asks again for what takes too long, until it is cancelled."""
        while True:
            await asyncio.sleep(self.machine.config.look_s)
            self._run(self.machine.passed(time.monotonic()))

    def offered(self, notice: MicrobatchNotice) -> str:
        """The answer to an offer of samples."""
        return "accepted" if self.machine.wants(_key(notice)) else "held"

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        key = _key(notice)
        for waiting in self._waiting.pop(key, ()):
            if not waiting.done():
                waiting.set_result((tensors[0], notice.replaced))
        self._run(self.machine.arrived(key, notice.sender, notice.load, time.monotonic()))

    def route(self, table: RouteTable) -> None:
        self._run(self.machine.route(table, time.monotonic()))

    def failed(self, peer: Member) -> None:
        self._run(self.machine.failed(peer, time.monotonic()))

    def _run(self, effects: Iterable[Pull]) -> None:
        for effect in effects:
            self._start(self._pull(effect))

    async def _pull(self, pull: Pull) -> None:
        evaluate, step, microbatch = pull.key
        transfer = TensorTransfer(
            direction="pull",
            receiver=pull.of,
            stage=self.machine.stage,
            step=step,
            microbatch=microbatch,
            evaluate=evaluate,
        )
        if not await self._send(transfer, lambda: self.machine.wants(pull.key)):
            self.failed(pull.of)


class Answers:
    """What other units ask this one for.

    Args:
        stage: Number of the units that ask.
        make: The samples of a microbatch, and how many of them were replaced.
        send: Sends them.
        start: Runs in the background.
    """

    def __init__(
        self,
        stage: int,
        make: Callable[[Key], Awaitable[tuple[Sequence[Sample], int]]],
        send: Send,
        start: Start,
    ) -> None:
        self._stage = stage
        self._make = make
        self._send = send
        self._start = start
        self._in_hand: set[tuple[Key, Member]] = set()
        self.sent = 0

    @property
    def in_hand(self) -> int:
        return len(self._in_hand)

    def load(self, service_ms: float) -> HopLoad:
        return HopLoad(open=self.in_hand, service_ms=service_ms)

    def asked(self, notice: MicrobatchNotice) -> None:
        """Begins to answer, unless the same is being answered."""
        work = (_key(notice), notice.sender)
        if work not in self._in_hand:
            self._in_hand.add(work)
            self._start(self._answer(*work))

    async def _answer(self, key: Key, to: Member) -> None:
        try:
            evaluate, step, microbatch = key
            samples, replaced = await self._make(key)
            record = packed(samples)
            transfer = TensorTransfer(
                direction="records",
                receiver=to,
                stage=self._stage,
                step=step,
                microbatch=microbatch,
                evaluate=evaluate,
                replaced=replaced,
                tensors=(record,),
            )
            self._in_hand.discard((key, to))  # the load that goes with it no longer counts it
            await self._send(transfer, lambda: True)
            self.sent += 1
        finally:
            self._in_hand.discard((key, to))


def _key(notice: MicrobatchNotice) -> Key:
    return (notice.evaluate, notice.step, notice.microbatch)
