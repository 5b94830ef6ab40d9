"""A data instance (draft §7.2(1)): makes batches when its gateway dispatches them, and sends them on.

A batch is a pure function of (seed, step, microbatch), so any data instance can make any batch, repeatedly,
with the same result. This is the shell around `workers.transaction.data_machine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from bus.subject_row import Subject
from bus.subjects import ADOPT, COPY_SEND, COPY_STATUS, STEP_ABORT, STEP_ASSIGN, STEP_DISPATCH, STEP_FENCE
from schemas.data_plane import MicrobatchNotice
from schemas.errors import Ack, BadData
from schemas.evaluation_sets import evaluation_microbatch
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
from workers.data.opening import open_source
from workers.data.prefetch import Prefetcher
from workers.data.storage import node_cache
from workers.links.hop_exchange import COPIES, TensorTransfer
from workers.local_store.recorder import Order
from workers.stage.hop_runtime import HopRuntime, InstanceContext
from workers.stage.neighbour_blocks import NeighbourBlocks
from workers.transaction.data_machine import DataMachine, Send

VALIDATION_STEP = 0
"""Validation always draws the same windows, so that its losses can be compared along the run."""


class DataRuntime(HopRuntime):
    """Sends batches to the first stage."""

    machine: DataMachine

    def __init__(self, context: InstanceContext) -> None:
        super().__init__(context)
        self.sent = 0
        self._node = agent_name(context.cluster, context.node)
        self._neighbours: NeighbourBlocks | None = None
        self.machine = DataMachine(self.member, epoch=self.epoch, binder=self.binder)

    @property
    def step(self) -> int:
        return self.machine.step

    async def build(self) -> None:
        """Opens the data (through fsspec, or the gateway's object store) and starts the prefetcher.

        Raises:
            BadData: See `open_source`; or it is not the data that was analysed.
        """
        self.source = await open_source(self.start.spec, self.bus)
        if self.start.data_digest not in ("", self.source.digest):
            raise BadData(
                f"the data on the node of {self.member.sid} differs from the data that was analysed "
                f"({self.source.digest[:12]} ≠ {self.start.data_digest[:12]}): give every node the same files"
            )
        self.prefetcher = Prefetcher(self.source)
        self._travelling = [schema.name for schema in self.start.batch]

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
    def offered(self, notice: MicrobatchNotice) -> str:
        if notice.direction == "block" and self._neighbours is not None:
            return self._neighbours.offered(notice)
        return super().offered(notice)

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        if notice.direction == "block" and self._neighbours is not None:
            self._neighbours.received(notice, tensors)
        elif notice.direction in COPIES:
            self.store_replica(notice, tensors)
        else:
            self.run(self.machine.arrived(notice))

    def run(self, effects: Iterable[Send]) -> None:
        for effect in effects:
            self.track(self._send(effect))

    async def _send(self, send: Send) -> None:
        step, attempt, microbatch, evaluate = send.work
        split, draw, number = "train", step, microbatch
        if evaluate:
            draw = VALIDATION_STEP
            split, number = evaluation_microbatch(self.start.spec, microbatch)
        batch = await self.prefetcher.get(split, draw, number)
        if not self.machine.current(send.work, send.to):
            return
        if not evaluate:
            self.prefetcher.expect(split, step + 1, microbatch)
        transfer = TensorTransfer(
            direction="forward",
            receiver=send.to,
            stage=0,
            step=step,
            attempt=attempt,
            round=self.machine.snapshot.round(self.epoch, step, attempt),
            microbatch=microbatch,
            evaluate=evaluate,
            tensors=tuple(batch[name] for name in self._travelling or batch),
        )
        await self.deliver(transfer, lambda: self.machine.current(send.work, send.to))
        self.sent += 1

    def figures(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "in_flight": self.machine.in_flight,
            "microbatches": self.sent,
            "replaced": self.source.replaced,
        }

    async def close(self) -> None:
        node_cache.neighbours.connect(None)
        if self._neighbours is not None:
            await self._neighbours.close()
        await super().close()
        self.prefetcher.close()
