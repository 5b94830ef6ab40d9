"""A data instance (draft §7.2(1)): makes batches when its gateway dispatches them, and sends them on.

A batch is a pure function of (seed, step, microbatch), so any data instance can make any of them, again
and again, with the same result.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import LINK_FAULT
from schemas.cluster import InstanceStart
from schemas.data_plane import MicrobatchNotice
from schemas.errors import Ack, DmscError, Fenced, PeerUnreachable
from schemas.fault import LinkFault
from schemas.step import Member, MicrobatchDispatch, StepAbort, StepAborted
from workers.data import Prefetcher, Split, open_dataset
from workers.links import HopExchange
from workers.next_hop import Binder
from workers.user_code import describe

log = get_logger("data")

Work = tuple[int, int, int, bool]
"""(step, attempt, microbatch, evaluate)."""

VALIDATION_STEP = 0
"""Validation always draws the same windows, so that its losses can be compared along the run."""


@dataclass(kw_only=True)
class DataRuntime:
    """Sends batches to the first stage; holds each until its gradient came back there."""

    bus: Bus
    start: InstanceStart
    member: Member
    cluster: str
    failed: Callable[[DmscError], None]
    step: int = 0
    attempt: int = 0
    sent: int = 0
    exchange: HopExchange | None = None
    _queue: deque[Work] = field(default_factory=deque)
    _seen: set[Work] = field(default_factory=set)
    _open: dict[Work, Member] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.job = self.start.job
        self.epoch = self.start.epoch
        self.binder = Binder(self.cluster)
        self._wake = asyncio.Event()

    async def build(self) -> None:
        """Opens the dataset (through fsspec, or the gateway's object store) and starts the prefetcher."""
        spec = self.start.spec
        self.dataset = await open_dataset(spec.data, self.bus)
        self.prefetcher = Prefetcher(
            self.dataset,
            seed=spec.training.seed,
            samples=spec.training.microbatch_samples,
            sample_tokens=spec.data.sample_tokens,
        )

    async def dispatch(self, order: MicrobatchDispatch) -> Ack:
        """Takes microbatches to send. Idempotent; an older step or attempt counts for nothing."""
        if order.epoch != self.epoch:
            raise Fenced(f"epoch {order.epoch} speaks to an instance of epoch {self.epoch}")
        if order.attempt < self.attempt:
            return Ack(note="stale attempt")
        if order.attempt > self.attempt:
            self._forget(order.attempt)
        if order.step > self.step:
            self.binder.next_step()
            self._seen = {work for work in self._seen if work[0] >= order.step}
            for work in [work for work in self._open if work[0] < order.step]:
                self.binder.returned(self._open.pop(work).sid)  # the first stage forgets them, too
        self.step = max(self.step, order.step)
        for microbatch in order.microbatches:
            work = (order.step, order.attempt, microbatch, order.evaluate)
            if work not in self._seen:
                self._seen.add(work)
                self._queue.append(work)
        self._wake.set()
        return Ack()

    async def pump(self) -> None:
        """Sends what is queued, as far as the windows of the first stage allow. Runs until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                target = self.binder.bind(0)
                if target is None:
                    break
                work = self._queue.popleft()
                self._open[work] = target
                self._track(self._send(work, target))

    async def _send(self, work: Work, target: Member) -> None:
        step, attempt, microbatch, evaluate = work
        assert self.exchange is not None
        split: Split = "validation" if evaluate else "train"
        draw = VALIDATION_STEP if evaluate else step
        tensors: tuple[Tensor, ...] = await self.prefetcher.get(split, draw, microbatch)
        if attempt != self.attempt:
            return
        if not evaluate:
            self.prefetcher.expect(split, step + 1, microbatch)
        try:
            await self.exchange.send(
                direction="forward",
                receiver=target,
                stage=0,
                step=step,
                attempt=attempt,
                microbatch=microbatch,
                evaluate=evaluate,
                tensors=tensors,
            )
            self.sent += 1
        except PeerUnreachable as error:
            if attempt == self.attempt:
                await self.link_broke(target, error.text)

    async def link_broke(self, peer: Member, text: str) -> None:
        """Tells the cluster's router; what follows is the orchestrator's to decide."""
        fault = LinkFault(
            job=self.job,
            reporter=self.member.sid,
            peer=peer.sid,
            peer_incarnation=peer.incarnation,
            text=text,
        )
        await self.bus.publish(LINK_FAULT, fault, cluster=self.cluster)

    def decide(self, notice: MicrobatchNotice) -> str:
        """The first stage returns each microbatch with an empty offer: its window has room again."""
        if notice.epoch != self.epoch or notice.receiver != self.member or notice.direction != "backward":
            return "stale"
        work = (notice.step, notice.attempt, notice.microbatch, notice.evaluate)
        return "accepted" if self._open.get(work) == notice.sender else "held"

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        work = (notice.step, notice.attempt, notice.microbatch, notice.evaluate)
        if self._open.pop(work, None) is not None:
            self.binder.returned(notice.sender.sid)
            self._wake.set()

    def routes_changed(self) -> None:
        self._wake.set()

    async def abort(self, order: StepAbort) -> StepAborted:
        """Forgets what is queued and open below `order.attempt`. Idempotent."""
        if order.epoch != self.epoch:
            raise Fenced(f"epoch {order.epoch} speaks to an instance of epoch {self.epoch}")
        if self.member in order.fenced:
            self.failed(Fenced(f"{self.member.sid} {self.member.incarnation} was replaced"))
        for member in order.fenced:
            self.binder.fence(member)
            if self.exchange is not None:
                self.exchange.fence(member)
        if order.attempt > self.attempt:
            self._forget(order.attempt)
        return StepAborted(member=self.member, version=order.step)

    def _forget(self, attempt: int) -> None:
        self.attempt = attempt
        self._queue.clear()
        self._seen.clear()
        self._open.clear()
        self.binder.reset()
        for task in list(self._tasks):
            task.cancel()
        if self.exchange is not None:
            self.exchange.cancel_sends()

    def _track(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tracked)

    def _tracked(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if not isinstance(error, DmscError):
            log.error("data failed", sid=self.member.sid, exc_info=error)
            error = DmscError(f"data instance failed: {describe(error)}")
        self.failed(error)

    @property
    def in_flight(self) -> int:
        return len(self._open)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self.prefetcher.close()
