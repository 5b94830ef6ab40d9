"""A data instance (draft §7.2(1)): makes batches when its gateway dispatches them, and sends them on.

A batch is a pure function of (seed, step, microbatch), so any data instance can make any batch, repeatedly,
with the same result. This is the shell around `workers.transaction.data_machine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from schemas.data_plane import MicrobatchNotice
from schemas.errors import Ack
from schemas.step import (
    Adopt,
    Adopted,
    MicrobatchDispatch,
    StepAbort,
    StepAborted,
    StepAssign,
    StepFence,
    StepFenced,
)
from workers.compute.data import Prefetcher, Split, open_dataset
from workers.links.hop_exchange import COPIES
from workers.stage.hop_runtime import HopRuntime
from workers.transaction.data_machine import DataMachine, Send

VALIDATION_STEP = 0
"""Validation always draws the same windows, so that its losses can be compared along the run."""


@dataclass(kw_only=True)
class DataRuntime(HopRuntime):
    """Sends batches to the first stage."""

    sent: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.machine = DataMachine(self.member, epoch=self.epoch, binder=self.binder)

    @property
    def step(self) -> int:
        return self.machine.step

    @property
    def attempt(self) -> int:
        return self.machine.attempt

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

    # --- orders -------------------------------------------------------------------------------------------
    async def dispatch(self, order: MicrobatchDispatch) -> Ack:
        """Takes microbatches to send. Idempotent; an order of an older attempt is ignored."""
        self._check_epoch(order.epoch)
        if order.attempt < self.attempt:
            return Ack(note="stale attempt")
        if order.attempt > self.attempt:
            self._forget(order.attempt)
        self._run(self.machine.dispatch(order))
        return Ack()

    async def fence(self, order: StepFence) -> StepFenced:
        """Sends nothing more to the fenced incarnations; answers with its microbatches of the step."""
        self._check_epoch(order.epoch)
        self._fence_links(order.fenced)
        self._run(self.machine.fence(order.fenced))
        return StepFenced(
            member=self.member,
            version=order.step,
            round=order.round,
            held=self.machine.told(order.step, (order.epoch, order.attempt, order.round)),
        )

    async def assign(self, order: StepAssign) -> Ack:
        """Makes microbatches again for their new owners. Idempotent."""
        self._check_epoch(order.epoch)
        key = (order.epoch, order.attempt, order.round)
        self._run(self.machine.assign(key, order.step, order.paths))
        return Ack()

    async def adopt(self, order: Adopt) -> Adopted:
        """Obeys the epoch of a new leading orchestrator from now on, and answers with the present step."""
        self._take_epoch(order.epoch)
        self.machine.epoch = self.epoch
        return Adopted(member=self.member, version=self.step, attempt=self.attempt, generation=-1)

    async def abort(self, order: StepAbort) -> StepAborted:
        """Forgets the queued and open microbatches below `order.attempt`. Idempotent."""
        self._check_epoch(order.epoch)
        self._fence_links(order.fenced)
        self._run(self.machine.fence(order.fenced))
        if order.attempt > self.attempt:
            self._forget(order.attempt)
        return StepAborted(member=self.member, version=order.step)

    def _forget(self, attempt: int) -> None:
        self.machine.restarted(attempt)
        self._cancel_tasks()
        if self.exchange is not None:
            self.exchange.cancel_sends()

    # --- hops ---------------------------------------------------------------------------------------------
    def decide(self, notice: MicrobatchNotice) -> str:
        """The answer to an offer (see `DataMachine.offered`)."""
        return self.machine.offered(notice)

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        if notice.direction in COPIES:
            self.shelve(notice, tensors)
            return
        self._run(self.machine.arrived(notice))

    def routes_changed(self) -> None:
        self._run(self.machine.bind())

    def _run(self, effects: Iterable[Send]) -> None:
        for effect in effects:
            self._track(self._send(effect))

    async def _send(self, send: Send) -> None:
        step, attempt, microbatch, evaluate = send.work
        split: Split = "validation" if evaluate else "train"
        draw = VALIDATION_STEP if evaluate else step
        tensors: tuple[Tensor, ...] = await self.prefetcher.get(split, draw, microbatch)
        if not self.machine.current(send.work, send.to):
            return
        if not evaluate:
            self.prefetcher.expect(split, step + 1, microbatch)
        await self._deliver(
            send.to,
            direction="forward",
            stage=0,
            step=step,
            attempt=attempt,
            round=self.machine.cut.round(self.epoch, step, attempt),
            microbatch=microbatch,
            evaluate=evaluate,
            tensors=tensors,
            wanted=lambda: self.machine.current(send.work, send.to),
        )
        self.sent += 1

    @property
    def in_flight(self) -> int:
        return self.machine.in_flight

    async def close(self) -> None:
        await super().close()
        self.prefetcher.close()
