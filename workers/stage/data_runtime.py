"""A data instance (draft §7.2(1)): makes batches when its gateway dispatches them, and sends them on.

A batch is a pure function of (seed, step, microbatch), so any data instance can make any batch, repeatedly,
with the same result. This is the shell around `workers.transaction.data_machine`.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from bus.connection import Bus
from bus.subject_row import Subject
from bus.subjects import ADOPT, COPY_SEND, COPY_STATUS, STEP_ABORT, STEP_ASSIGN, STEP_DISPATCH, STEP_FENCE
from schemas.cluster import InstanceStart
from schemas.data_plane import MicrobatchNotice
from schemas.errors import Ack, BadData
from schemas.evaluation_sets import evaluation_microbatch
from schemas.job import JobSpec
from schemas.names import agent_name
from schemas.step import (
    Adopt,
    Adopted,
    Member,
    MicrobatchDispatch,
    StepAbort,
    StepAborted,
    StepAssign,
    StepFence,
    StepFenced,
)
from schemas.telemetry import DataFigures
from workers.data.batches import Batch, BatchSource, Split
from workers.data.opening import ArrivingData, open_source
from workers.data.prefetch import Prefetcher
from workers.data.storage import node_cache
from workers.links.hop_exchange import COPIES
from workers.links.offers import TensorTransfer
from workers.local_store.recorder import Order
from workers.stage.hop_runtime import HopRuntime, InstanceContext
from workers.stage.neighbour_blocks import NeighbourBlocks
from workers.telemetry.stall_clock import StallClock
from workers.transaction.data_machine import DataMachine, Send

VALIDATION_STEP = 0
"""Validation always draws the same windows, so that its losses can be compared along the run."""


def drawn(spec: JobSpec, step: int, microbatch: int, *, evaluate: bool) -> tuple[Split, int, int]:
    """What a microbatch is drawn from: its split, and step and number within it."""
    if not evaluate:
        return "train", step, microbatch
    split, number = evaluation_microbatch(spec, microbatch)
    return split, VALIDATION_STEP, number


async def open_analysed(start: InstanceStart, bus: Bus) -> BatchSource:
    """Opens the job's data, without its `data.preprocess`, which others do.

    Raises:
        BadData: See `open_source`; or it is not the data that was analysed.
    """
    source = await open_source(start.spec, bus, chained=False)
    if isinstance(source, ArrivingData) and start.data_digest not in ("", source.digest):
        raise BadData(
            f"feed {source.feed.record.name} is another one than when the job was analysed: it was deleted, "
            "and created again"
        )
    if start.data_digest not in ("", source.digest):
        raise BadData(
            f"the data on the node of {start.unit.sid} differs from the data that was analysed "
            f"({source.digest[:12]} ≠ {start.data_digest[:12]}): give every node the same files"
        )
    return source


async def arrival(source: BatchSource, split: Split, step: int, microbatch: int) -> None:
    """Waits for the records of a microbatch that was dispatched, where they arrive: they are at the bus.

    Raises:
        BadData: They will never be there.
    """
    if isinstance(source, ArrivingData) and not await source.arrive(split, step, microbatch):
        raise BadData(
            f"feed {source.feed.record.name} was closed with {source.feed.rows.count:,} records, and step "
            f"{step} needs more"
        )


class EntryRuntime(HopRuntime):
    """Sends batches to the first stage, wherever they come from."""

    machine: DataMachine

    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        self.sent = 0
        self.stall = StallClock()
        self.machine = DataMachine(self.member, epoch=self.epoch, binder=self.binder)
        self._travelling = [schema.name for schema in self.start.batch]
        self._paused: asyncio.TimerHandle | None = None

    @property
    def step(self) -> int:
        return self.machine.step

    # --- orders -------------------------------------------------------------------------------------------
    def orders(self) -> list[tuple[Subject, Order]]:
        return [
            (STEP_DISPATCH, self.dispatch),
            (STEP_FENCE, self.fence),
            (STEP_ASSIGN, self.assign),
            (STEP_ABORT, self.abort),
            (ADOPT, self.adopt),
            (COPY_STATUS, self.copy_status),
            (COPY_SEND, self.send_copy),
        ]

    async def dispatch(self, order: MicrobatchDispatch) -> Ack:
        """Takes microbatches to send. Idempotent; an order of an older attempt is ignored."""
        if order.attempt < self.attempt:
            return Ack(note="stale attempt")
        if order.attempt > self.attempt:
            self._forget(order.attempt)
        self.run(self.machine.dispatch(order))
        return Ack()

    async def fence(self, order: StepFence) -> StepFenced:
        """Sends nothing more to the fenced incarnations; answers with its microbatches of the step."""
        self._fence(order.fenced)
        key = (order.epoch, order.attempt, order.round)
        hops = self.machine.answer_round(order.step, key)
        return StepFenced(member=self.member, version=order.step, round=order.round, held=hops)

    async def assign(self, order: StepAssign) -> Ack:
        """Makes microbatches again for their new owners. Idempotent."""
        key = (order.epoch, order.attempt, order.round)
        self.run(self.machine.assign(key, order.step, order.paths))
        return Ack()

    async def adopt(self, order: Adopt) -> Adopted:
        """Obeys the epoch of a new leading orchestrator from now on, and answers with the present step."""
        self._take_epoch(order.epoch)
        return Adopted(
            member=self.member,
            version=self.step,
            attempt=self.attempt,
            generation=-1,
            fenced=tuple(self.machine.fenced),
        )

    async def abort(self, order: StepAbort) -> StepAborted:
        """Forgets the queued and open microbatches below `order.attempt`. Idempotent."""
        self._fence(order.fenced)
        if order.attempt > self.attempt:
            self._forget(order.attempt)
        return StepAborted(member=self.member, version=order.step)

    def _fence(self, members: Sequence[Member]) -> None:
        super()._fence(members)
        self.run(self.machine.fence(members))

    def _forget(self, attempt: int) -> None:
        self.machine.restarted(attempt)
        self.cancel_work()

    # --- hops ---------------------------------------------------------------------------------------------
    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        if notice.direction in COPIES:
            self.store_replica(notice, tensors)
        else:
            self.run(self.machine.arrived(notice))

    @abstractmethod
    async def make(self, step: int, microbatch: int, *, evaluate: bool) -> tuple[Batch, int]:
        """A microbatch, for training or for a validation, and how many of its samples were replaced."""

    @abstractmethod
    def make_ahead(self, step: int, microbatch: int) -> None:
        """Begins to make a microbatch that will probably be needed soon."""

    def run(self, effects: Iterable[Send]) -> None:
        for effect in effects:
            self.track(self._send(effect))
        if (pause_s := self.binder.pause_s(0)) <= 0:
            return
        loop = asyncio.get_running_loop()
        if self._paused is not None:
            if self._paused.when() <= loop.time() + pause_s:
                return
            self._paused.cancel()  # the rate was raised meanwhile
        self._paused = loop.call_later(pause_s, self._go_on)

    def _go_on(self) -> None:
        """The admission rate lets the next microbatch go."""
        self._paused = None
        self.run(self.machine.bind())

    async def close(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
        await super().close()

    async def _send(self, send: Send) -> None:
        step, attempt, microbatch, evaluate = send.work
        with self.stall.waiting():
            batch, replaced = await self.make(step, microbatch, evaluate=evaluate)
        if not self.machine.current(send.work, send.to):
            return
        if not evaluate:
            self.make_ahead(step + 1, microbatch)
        transfer = TensorTransfer(
            direction="forward",
            receiver=send.to,
            stage=0,
            step=step,
            attempt=attempt,
            round=self.machine.snapshot.round(self.epoch, step, attempt),
            microbatch=microbatch,
            evaluate=evaluate,
            replaced=replaced,
            tensors=tuple(batch[name] for name in self._travelling or batch),
        )
        await self.deliver(transfer, lambda: self.machine.current(send.work, send.to))
        self.sent += 1


class DataRuntime(EntryRuntime):
    """Makes its batches itself."""

    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        self._node = agent_name(context.cluster, context.node)
        self._neighbours: NeighbourBlocks | None = None

    async def build(self) -> None:
        """Opens the data (through fsspec, or the gateway's object store) and starts the prefetcher.

        Raises:
            BadData: See `open_analysed`.
        """
        self.source = await open_analysed(self.start, self.bus)
        self.prefetcher = Prefetcher(self.source)

    async def open(self) -> None:
        await super().open()
        cache = node_cache.shared_cache()
        if cache is None:
            return
        line = NeighbourBlocks(
            self.bus,
            job=self.job,
            member=self.member,
            node=self._node,
            cache=cache,
            send=self.exchange.send,
        )
        self._neighbours = line
        await line.open()
        node_cache.neighbours.connect(line)

    def offered(self, notice: MicrobatchNotice) -> str:
        if notice.direction == "block" and self._neighbours is not None:
            return self._neighbours.offered(notice)
        return super().offered(notice)

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        if notice.direction == "block" and self._neighbours is not None:
            self._neighbours.received(notice, tensors)
        else:
            super().received(notice, tensors)

    async def make(self, step: int, microbatch: int, *, evaluate: bool) -> tuple[Batch, int]:
        place = drawn(self.start.spec, step, microbatch, evaluate=evaluate)
        await arrival(self.source, *place)
        return await self.prefetcher.get(*place)

    def make_ahead(self, step: int, microbatch: int) -> None:
        if isinstance(self.source, ArrivingData):
            self.track(self._expect(self.source, step, microbatch))
        else:
            self.prefetcher.expect("train", step, microbatch)

    async def _expect(self, source: ArrivingData, step: int, microbatch: int) -> None:
        if await source.arrive("train", step, microbatch):
            self.prefetcher.expect("train", step, microbatch)

    def figures(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "in_flight": self.machine.in_flight,
            "microbatches": self.sent,
            "replaced": self.source.replaced,
            "data": DataFigures(stalled_s=self.stall.seconds, read_bytes=node_cache.counts.bytes),
        }

    async def close(self) -> None:
        node_cache.neighbours.connect(None)
        if self._neighbours is not None:
            await self._neighbours.close()
        await super().close()
        self.prefetcher.close()
