"""Microbatches at one stage: offered, computed forward, sent on, computed backward, summed, claimed.

This is the shell around `workers.transaction.stage_machine`: it carries out the machine's effects. The event
loop owns all state here; the compute thread owns the state of `StageCompute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bus.subjects import STEP_CLAIM
from schemas.step import MicrobatchClaim, MicrobatchState
from workers.compute.attribution import attributing
from workers.compute.compute_thread import ComputeThread, Priority
from workers.compute.stage_compute import StageCompute
from workers.links.offers import TensorTransfer
from workers.stage.hop_runtime import HopRuntime
from workers.telemetry.load import ComputeLoad
from workers.transaction.microbatch import Hop
from workers.transaction.stage_machine import Backward, Effect, Forward, Offer, ReportClaim, StageMachine


class StageFlow:
    """Passes microbatches through the layers of `layers`, as `machine` decides, and sends them by `runtime`.

    `summed` is called after each addition to the sum of the open step.

    User code that raises, or a gradient that can't be summed, ends the instance: an instance that fails while
    adding fences itself (DESIGN §5 rule 4).
    """

    def __init__(
        self,
        runtime: HopRuntime,
        machine: StageMachine,
        thread: ComputeThread,
        layers: StageCompute,
        summed: Callable[[], None],
    ) -> None:
        self.load = ComputeLoad()
        self._runtime = runtime
        self._machine = machine
        self._thread = thread
        self._layers = layers
        self._summed = summed
        spec = runtime.start.spec
        self._microbatch_tokens = spec.training.microbatch_samples * spec.data.tokens_per_sample

    def run(self, effects: Iterable[Effect]) -> None:
        """Carries out the machine's effects."""
        track = self._runtime.track
        for effect in effects:
            match effect:
                case Forward(hop):
                    track(self._forward(hop))
                case Backward(hop):
                    track(self._backward(hop))
                case Offer(hop):
                    track(self._send(effect))
                case ReportClaim(hop):
                    self._report_claim(hop)

    async def _forward(self, hop: Hop) -> None:
        with attributing(hop):
            await self._thread.submit(Priority.FORWARD, lambda: self._if_current(hop, self._layers.forward))
        self.run(self._machine.forwarded(hop))

    async def _backward(self, hop: Hop) -> None:
        with attributing(hop):
            await self._thread.submit(
                Priority.BACKWARD, lambda: self._if_current(hop, self._compute_backward)
            )
        self.run(self._machine.accumulated(hop))

    def _compute_backward(self, hop: Hop) -> None:
        assert hop.returned is not None
        self._layers.backward(hop, hop.returned)
        hop.returned = ()

    def _if_current(self, hop: Hop, work: Callable[[Hop], None]) -> None:
        """Runs `work` on the compute thread, unless the step was given up while the task waited."""
        if self._machine.current(hop):
            work(hop)

    async def _send(self, offer: Offer) -> None:
        hop, machine, forward = offer.hop, self._machine, offer.direction == "forward"
        transfer = TensorTransfer(
            direction=offer.direction,
            receiver=offer.to,
            stage=machine.stage + (1 if forward else -1),
            step=hop.step,
            attempt=hop.attempt,
            round=machine.snapshot.round(machine.epoch, hop.step, hop.attempt),
            microbatch=hop.microbatch,
            evaluate=hop.evaluate,
            tensors=hop.sent_forward if forward else hop.sent_backward,
        )
        await self._runtime.deliver(transfer, lambda: machine.current(hop) or hop.evaluate)

    def _report_claim(self, hop: Hop) -> None:
        if not hop.evaluate and not hop.measured:
            hop.measured = True
            self.load.measured(hop.forward_ms, hop.backward_ms)
            self.load.tokens += self._microbatch_tokens
        if not hop.evaluate:
            self._summed()
        runtime = self._runtime
        claim = self._claim(hop)
        runtime.track(runtime.bus.publish(STEP_CLAIM, claim, job=runtime.job, sid=runtime.member.sid))

    def _claim(self, hop: Hop) -> MicrobatchClaim:
        return MicrobatchClaim(
            job=self._runtime.job,
            epoch=self._machine.epoch,
            step=hop.step,
            attempt=hop.attempt,
            microbatch=hop.microbatch,
            stage=self._machine.stage,
            owner=self._machine.member,
            upstream=hop.upstream.sid,
            evaluate=hop.evaluate,
            loss=hop.loss,
            weight=hop.weight,
            metrics=hop.metrics,
            replaced=hop.replaced,
            forward_ms=hop.forward_ms,
            backward_ms=hop.backward_ms,
        )

    async def forget(self, attempt: int) -> None:
        """Begins a new attempt: drops the queues, sums and offers of older ones."""
        self._thread.purge()
        self._machine.restarted(attempt)
        self._runtime.cancel_work()
        # Queued behind the running computation, so that nothing of the old attempt is added after it.
        await self._thread.order(self._layers.clear)
        self._runtime.exchange.reconsider()

    # --- figures ----------------------------------------------------------------------------------------
    def claims(self, step: int, attempt: int, *, evaluate: bool = False) -> tuple[MicrobatchClaim, ...]:
        """Claims of this step's microbatches in the sum; `evaluate`: of the scored ones (last stage only)."""
        if evaluate and not self._machine.last:
            return ()
        return tuple(
            self._claim(hop)
            for hop in self._machine.hops.values()
            if (hop.step, hop.attempt) == (step, attempt)
            and hop.state is MicrobatchState.ACCUMULATED
            and hop.evaluate == evaluate
        )

    def waiting(self) -> tuple[str, ...]:
        """Every microbatch and its state, in words."""
        return tuple(f"microbatch {hop.microbatch}: {hop.state}" for hop in self._machine.hops.values())
