"""Microbatches at one stage: offered, computed forward, sent on, computed backward, summed, claimed.

This is the shell around `workers.transaction.stage_machine`: it carries out the machine's effects. The event
loop owns all state here; the compute thread owns the state of `StageCompute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bus.subjects import STEP_CLAIM
from schemas.data_plane import HopLoad, MicrobatchNotice
from schemas.step import MicrobatchClaim, MicrobatchState
from workers.compute.attribution import attributing
from workers.compute.compute_thread import ComputeThread, Priority
from workers.compute.stage_compute import StageCompute
from workers.links.hop_exchange import COPIES
from workers.stage.hop_runtime import HopRuntime
from workers.state.stage_state import StageState
from workers.telemetry.load import ComputeLoad
from workers.transaction.microbatch import Hop
from workers.transaction.stage_machine import Backward, Effect, Forward, Offer, ReportClaim, StageMachine


@dataclass(kw_only=True)
class StageFlow(HopRuntime):
    """Passes microbatches through layers `unit.first_layer`..`unit.last_layer`.

    User code that raises, or a gradient that can't be summed, ends the instance: an instance that fails while
    adding fences itself (DESIGN §5 rule 4).
    """

    device: torch.device
    compute: ComputeThread
    load: ComputeLoad = field(default_factory=ComputeLoad)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stage = self.start.unit.stage
        self.last = self.stage == self.start.stages - 1
        self.training = self.start.spec.training
        self.trained = StageCompute(self.start, self.device)
        self.state = StageState(
            self.bus, self.start, self.member, self.compute, self.trained, self._version_changed
        )
        self.machine = StageMachine(
            self.member, epoch=self.epoch, stage=self.stage, last=self.last, binder=self.binder
        )

    @property
    def version(self) -> int:
        """The number of applied steps, which is the number of the step that this instance works on."""
        return self.machine.version

    @property
    def attempt(self) -> int:
        return self.machine.attempt

    def _version_changed(self) -> None:
        if self.machine.version != self.state.version:
            self._run(self.machine.applied(self.state.version))
        if self.exchange is not None:
            self.exchange.reconsider()

    # --- hops -----------------------------------------------------------------------------------------
    def decide(self, notice: MicrobatchNotice) -> str:
        """The answer to an offer: `accepted`, `held`, `stale` or `later` (see `NoticeAnswer`)."""
        return self.machine.offered(notice)

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Passes the tensors of an accepted offer to the replica buffer, the state or the machine."""
        if notice.direction in COPIES and notice.stage != self.stage:
            self.shelve(notice, tensors)
        elif notice.direction == "state":
            if self.machine.takes(notice):
                self._track(self.state.take(notice.step, list(tensors), lambda: self.machine.takes(notice)))
        elif notice.direction == "redo":
            self._track(self.state.redo(notice.step, tensors, lambda: self.machine.takes(notice)))
        else:
            self._run(self.machine.arrived(notice, tensors))

    def load_told(self) -> HopLoad | None:
        return HopLoad(open=self.machine.open, service_ms=self.load.service_ms)

    def routes_changed(self) -> None:
        self._run(self.machine.bind())

    def _run(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Forward(hop):
                    self._track(self._forward(hop))
                case Backward(hop):
                    self._track(self._backward(hop))
                case Offer(hop):
                    self._track(self._send(effect))
                case ReportClaim(hop):
                    self._report_claim(hop)

    async def _forward(self, hop: Hop) -> None:
        with attributing(hop):
            await self.compute.submit(Priority.FORWARD, lambda: self._if_current(hop, self.trained.forward))
        self._run(self.machine.forwarded(hop))

    async def _backward(self, hop: Hop) -> None:
        with attributing(hop):
            await self.compute.submit(
                Priority.BACKWARD, lambda: self._if_current(hop, self._compute_backward)
            )
        self._run(self.machine.accumulated(hop))

    def _compute_backward(self, hop: Hop) -> None:
        assert hop.returned is not None
        self.trained.backward(hop, hop.returned)
        hop.returned = ()

    def _if_current(self, hop: Hop, work: Callable[[Hop], None]) -> None:
        """Runs `work` on the compute thread, unless the step was given up while the task waited."""
        if self.machine.current(hop):
            work(hop)

    async def _send(self, offer: Offer) -> None:
        hop, forward = offer.hop, offer.direction == "forward"
        await self._deliver(
            offer.to,
            direction=offer.direction,
            stage=self.stage + (1 if forward else -1),
            step=hop.step,
            attempt=hop.attempt,
            round=self.machine.cut.round(self.epoch, hop.step, hop.attempt),
            microbatch=hop.microbatch,
            evaluate=hop.evaluate,
            tensors=hop.sent_forward if forward else hop.sent_backward,
            wanted=lambda: self.machine.current(hop) or hop.evaluate,
        )

    def _report_claim(self, hop: Hop) -> None:
        if not hop.evaluate and not hop.measured:
            hop.measured = True
            self.load.measured(hop.forward_ms, hop.backward_ms)
            self.load.tokens += self.training.microbatch_samples * self.start.spec.data.sample_tokens
        self._track(self._publish_claim(self._claim(hop)))

    async def _publish_claim(self, claim: MicrobatchClaim) -> None:
        await self.bus.publish(STEP_CLAIM, claim, job=self.job, sid=self.member.sid)

    def _claim(self, hop: Hop) -> MicrobatchClaim:
        return MicrobatchClaim(
            job=self.job,
            epoch=self.epoch,
            step=hop.step,
            attempt=hop.attempt,
            microbatch=hop.microbatch,
            stage=self.stage,
            owner=self.member,
            upstream=hop.upstream.sid,
            evaluate=hop.evaluate,
            loss=hop.loss,
            forward_ms=hop.forward_ms,
            backward_ms=hop.backward_ms,
        )

    # --- boundaries of attempts ---------------------------------------------------------------------------
    async def forget(self, attempt: int) -> None:
        """Begins a new attempt: drops the queues, sums and offers of older ones."""
        self.compute.purge()
        self.machine.restarted(attempt)
        self._cancel_tasks()
        if self.exchange is not None:
            self.exchange.cancel_sends()
        # Queued behind the running computation, so that nothing of the old attempt is added after it.
        await self.compute.submit(Priority.ORDER, self.trained.sum.clear)
        if self.exchange is not None:
            self.exchange.reconsider()

    def claims(self, step: int, attempt: int, *, evaluate: bool = False) -> tuple[MicrobatchClaim, ...]:
        """Claims of this step's microbatches in the sum; `evaluate`: of the scored ones (last stage only)."""
        if evaluate and not self.last:
            return ()
        return tuple(
            self._claim(hop)
            for hop in self.machine.hops.values()
            if (hop.step, hop.attempt) == (step, attempt)
            and hop.state is MicrobatchState.ACCUMULATED
            and hop.evaluate == evaluate
        )

    def waiting(self) -> tuple[str, ...]:
        """Every microbatch and its state, in words."""
        return tuple(f"microbatch {hop.microbatch}: {hop.state}" for hop in self.machine.hops.values())

    # --- figures ----------------------------------------------------------------------------------------
    @property
    def in_flight(self) -> int:
        return sum(hop.state is not MicrobatchState.ACCUMULATED for hop in self.machine.hops.values())

    @property
    def retained_bytes(self) -> int:
        return sum(hop.retained_bytes for hop in self.machine.hops.values())
