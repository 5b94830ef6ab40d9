"""Microbatches at one stage: offered, computed forward, sent on, computed backward, summed, claimed.

The event loop owns all state here; the compute thread owns what `StageCompute` holds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bus.connection import Bus
from bus.logs import get_logger
from bus.subjects import LINK_FAULT, STEP_CLAIM
from schemas.cluster import InstanceStart
from schemas.data_plane import MicrobatchNotice
from schemas.errors import DmscError, PeerUnreachable
from schemas.fault import LinkFault
from schemas.step import (
    Member,
    MicrobatchClaim,
)
from workers.compute import ComputeThread, Priority
from workers.links import Direction, HopExchange
from workers.microbatch import Hop, HopKey, MicrobatchState
from workers.next_hop import Binder
from workers.stage_compute import StageCompute
from workers.stage_state import StageState
from workers.user_code import describe

log = get_logger("stage")


@dataclass(slots=True)
class Load:
    """Moving figures for telemetry; milliseconds per microbatch."""

    forward_ms: float = 0.0
    backward_ms: float = 0.0
    reduce_ms: float = 0.0
    microbatches: int = 0
    tokens: int = 0

    def measured(self, forward_ms: float, backward_ms: float) -> None:
        keep = 0.8 if self.microbatches else 0.0
        self.forward_ms = keep * self.forward_ms + (1 - keep) * forward_ms
        self.backward_ms = keep * self.backward_ms + (1 - keep) * backward_ms
        self.microbatches += 1


@dataclass(kw_only=True)
class StageFlow:
    """Microbatches through layers `unit.first_layer`..`unit.last_layer`, as they come and go.

    `failed` is called once with a reason when this instance can't go on (user code raised, a gradient
    that can't be summed): a failure while adding fences oneself (DESIGN §5 rule 4).
    """

    bus: Bus
    start: InstanceStart
    member: Member
    cluster: str
    device: torch.device
    compute: ComputeThread
    failed: Callable[[DmscError], None]
    load: Load = field(default_factory=Load)
    attempt: int = 0

    def __post_init__(self) -> None:
        self.job = self.start.job
        self.epoch = self.start.epoch
        self.stage = self.start.unit.stage
        self.last = self.stage == self.start.stages - 1
        self.training = self.start.spec.training
        self.trained = StageCompute(self.start, self.device)
        self.state = StageState(
            self.bus, self.start, self.member, self.compute, self.trained, self._version_changed
        )
        self.binder = Binder(self.cluster)
        self.exchange: HopExchange | None = None
        self._hops: dict[HopKey, Hop] = {}
        self._unbound: deque[Hop] = deque()
        self._early: list[tuple[MicrobatchNotice, tuple[Tensor, ...]]] = []
        self._sends: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        """Steps applied: the number of the step that this instance works on."""
        return self.state.version

    def _version_changed(self) -> None:
        if self.exchange is not None:
            self.exchange.reconsider()

    # --- hops -----------------------------------------------------------------------------------------
    def decide(self, notice: MicrobatchNotice) -> str:
        """The answer to an offer: `accepted`, `held`, `stale` or `later` (see `NoticeAnswer`)."""
        if notice.epoch < self.epoch or notice.receiver != self.member:
            return "stale"
        if notice.direction == "state":
            return "accepted"
        if notice.epoch > self.epoch or notice.attempt > self.attempt:
            return "later"
        if notice.attempt < self.attempt or notice.step < self.version:
            return "stale"
        if notice.step > self.version + 1:
            return "later"
        hop = self._hops.get((notice.step, notice.microbatch, notice.evaluate))
        if notice.direction == "forward":
            early = any(_same(notice, other) for other, _ in self._early)
            return "held" if hop is not None or early else "accepted"
        if hop is None:
            return "stale"
        waits = hop.state is MicrobatchState.FORWARD_DONE and hop.downstream == notice.sender
        return "accepted" if waits else "held"

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Tensors of an accepted offer are here."""
        if notice.direction == "state":
            self._track(self.state.take(notice.step, list(tensors)))
            return
        if notice.attempt != self.attempt or notice.step < self.version or notice.epoch != self.epoch:
            return
        if notice.direction == "forward":
            if notice.step > self.version:
                self._early.append((notice, tuple(tensors)))
            else:
                self._arrive(notice, tuple(tensors))
            return
        hop = self._hops.get((notice.step, notice.microbatch, notice.evaluate))
        if hop is None or hop.state is not MicrobatchState.FORWARD_DONE or hop.downstream != notice.sender:
            return
        self.binder.returned(notice.sender.sid)
        self._bind_waiting()
        hop.advance(MicrobatchState.BACKWARD_QUEUED)
        self._track(self._backward(hop, tuple(tensors)))

    def _arrive(self, notice: MicrobatchNotice, tensors: tuple[Tensor, ...]) -> None:
        key = (notice.step, notice.microbatch, notice.evaluate)
        if key in self._hops:
            return
        hop = Hop(
            notice.step, notice.microbatch, notice.attempt, notice.evaluate, notice.sender, inputs=tensors
        )
        self._hops[key] = hop
        hop.advance(MicrobatchState.FORWARD_QUEUED)
        self._track(self._forward(hop))

    async def _forward(self, hop: Hop) -> None:
        await self.compute.submit(Priority.FORWARD, lambda: self._if_current(hop, self.trained.forward))
        if not self._current(hop):
            return
        if self.last:
            hop.advance(MicrobatchState.ACCUMULATED)
            self._finish(hop)
            return
        hop.advance(MicrobatchState.FORWARD_DONE)
        self._unbound.append(hop)
        self._bind_waiting()

    async def _backward(self, hop: Hop, gradients: tuple[Tensor, ...]) -> None:
        await self.compute.submit(
            Priority.BACKWARD,
            lambda: self._if_current(hop, lambda hop: self.trained.backward(hop, gradients)),
        )
        if not self._current(hop):
            return
        hop.advance(MicrobatchState.ACCUMULATED)
        self._finish(hop)

    def _finish(self, hop: Hop) -> None:
        """The hop is in the sum (or scored): give the gradient back upstream and claim it."""
        self._offer(hop, hop.upstream, "backward", self.stage - 1, hop.sent_backward)
        if not hop.evaluate:
            self.load.measured(hop.forward_ms, hop.backward_ms)
            self.load.tokens += self.training.microbatch_samples * self.start.spec.data.sample_tokens
        if not hop.evaluate or self.last:
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

    def routes_changed(self) -> None:
        """A new route table may open a way for what waits."""
        self._bind_waiting()

    def _bind_waiting(self) -> None:
        while self._unbound:
            target = self.binder.bind(self.stage + 1)
            if target is None:
                return
            hop = self._unbound.popleft()
            hop.downstream = target
            self._offer(hop, target, "forward", self.stage + 1, hop.sent_forward)

    def _offer(
        self, hop: Hop, to: Member, direction: Direction, stage: int, tensors: tuple[Tensor, ...]
    ) -> None:
        self._track(self._send(hop, to, direction, stage, tensors))

    async def _send(
        self, hop: Hop, to: Member, direction: Direction, stage: int, tensors: tuple[Tensor, ...]
    ) -> None:
        assert self.exchange is not None
        try:
            await self.exchange.send(
                direction=direction,
                receiver=to,
                stage=stage,
                step=hop.step,
                attempt=hop.attempt,
                microbatch=hop.microbatch,
                evaluate=hop.evaluate,
                tensors=tensors,
            )
        except PeerUnreachable as error:
            if self._current(hop) or hop.evaluate:
                await self.link_broke(to, error.text)

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

    def _if_current(self, hop: Hop, work: Callable[[Hop], None]) -> None:
        """On the compute thread: an abort may have come while the task waited."""
        if self._current(hop):
            work(hop)

    def _current(self, hop: Hop) -> bool:
        return hop.attempt == self.attempt and hop.step == self.version and self._hops.get(hop.key) is hop

    def _track(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._sends.add(task)
        task.add_done_callback(self._tracked)

    def _tracked(self, task: asyncio.Task[None]) -> None:
        self._sends.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if not isinstance(error, DmscError):
            log.error("stage failed", sid=self.member.sid, exc_info=error)
            error = DmscError(f"stage {self.stage} failed: {describe(error)}")
        self.failed(error)

    # --- boundaries of steps and attempts ----------------------------------------------------------------
    def next_step(self) -> None:
        """The version moved on: forget the step before, take up what came early.

        A validation may still be on its way here, scored already: nothing returns it any more, so its
        place in the window is given back now.
        """
        for hop in [hop for hop in self._hops.values() if hop.step < self.version]:
            del self._hops[hop.key]
            if hop.state is MicrobatchState.FORWARD_DONE and hop.downstream is not None:
                self.binder.returned(hop.downstream.sid)
        self._unbound = deque(hop for hop in self._unbound if hop.step >= self.version)
        self.binder.next_step()
        early, self._early = self._early, []
        for notice, tensors in early:
            if notice.step == self.version and notice.attempt == self.attempt:
                self._arrive(notice, tensors)

    async def forget(self, attempt: int) -> None:
        """A new attempt: queues, sums and offers of older ones go."""
        self.attempt = attempt
        self.compute.purge()
        self._hops.clear()
        self._unbound.clear()
        self._early.clear()
        self.binder.reset()
        for task in list(self._sends):
            task.cancel()
        if self.exchange is not None:
            self.exchange.cancel_sends()
        # behind whatever computes now, so that nothing of the old attempt lands after it
        await self.compute.submit(Priority.ORDER, self.trained.sum.clear)
        if self.exchange is not None:
            self.exchange.reconsider()

    def claims(self, step: int, attempt: int, *, evaluate: bool = False) -> tuple[MicrobatchClaim, ...]:
        """What of this step is in the sum; `evaluate`: what was scored, which the last stage alone claims."""
        if evaluate and not self.last:
            return ()
        return tuple(
            self._claim(hop)
            for hop in self._hops.values()
            if (hop.step, hop.attempt) == (step, attempt)
            and hop.state is MicrobatchState.ACCUMULATED
            and hop.evaluate == evaluate
        )

    def waiting(self) -> tuple[str, ...]:
        """Every microbatch and its state, in words."""
        return tuple(f"microbatch {hop.microbatch}: {hop.state}" for hop in self._hops.values())

    # --- figures ----------------------------------------------------------------------------------------
    @property
    def in_flight(self) -> int:
        return sum(hop.state is not MicrobatchState.ACCUMULATED for hop in self._hops.values())

    @property
    def retained_bytes(self) -> int:
        return sum(hop.retained_bytes for hop in self._hops.values())

    async def close(self) -> None:
        """Withdraws what is on its way out."""
        for task in list(self._sends):
            task.cancel()


def _same(one: MicrobatchNotice, other: MicrobatchNotice) -> bool:
    return (one.step, one.microbatch, one.evaluate) == (other.step, other.microbatch, other.evaluate)
