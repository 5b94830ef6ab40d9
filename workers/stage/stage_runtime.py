"""A stage's part in the step transaction (DESIGN §5): groups, prepare, commit, abort, state.

The thread that sums gradients also keeps the set of summed microbatches, so that a vote cannot name one that
is not in the sum. Every order is idempotent and carries the epoch, so that a former orchestrator decides
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bus.subject_row import Subject
from bus.subjects import (
    ADOPT,
    COPY_SEND,
    COPY_STATUS,
    COPY_TO,
    GROUP_FORM,
    STATE_RESTORE,
    STATE_SEND,
    STEP_ABORT,
    STEP_ASSIGN,
    STEP_COMMIT,
    STEP_FENCE,
    STEP_PREPARE,
    STEP_STATUS,
)
from bus.wire import request_progress
from schemas.cluster import InstanceStart
from schemas.data_plane import HopLoad, MicrobatchNotice
from schemas.errors import Ack, Conflict, Fenced
from schemas.peer_copy import CopyTo
from schemas.step import (
    Adopt,
    Adopted,
    GroupForm,
    GroupFormed,
    Member,
    MicrobatchState,
    StateReady,
    StateRestore,
    StateSend,
    StepAbort,
    StepAborted,
    StepApplied,
    StepAssign,
    StepCommit,
    StepFence,
    StepFenced,
    StepPrepare,
    StepStatus,
    StepStatusReply,
    StepVote,
)
from schemas.task_graph import TaskUnit
from workers.compute.compute_thread import ComputeThread
from workers.compute.stage_compute import StageCompute
from workers.links.hop_exchange import COPIES, LAYERS
from workers.links.offers import TensorTransfer
from workers.links.peer_copy import CopySource
from workers.local_store.recorder import Order
from workers.stage.followers import Followers
from workers.stage.hop_runtime import HopRuntime, InstanceContext
from workers.stage.layer_change import LayerChange
from workers.stage.preparation import Preparation
from workers.stage.stage_flow import StageFlow
from workers.state.stage_state import StageState
from workers.transaction.stage_machine import Effect, StageMachine
from workers.transport.pinned_buffers import HostCopy


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """How long the orders of a stage wait before they are answered."""

    follow_s: float = 10.0
    """An order to send state to a follower: for it to catch up.

    The transfer itself has no limit as long as it advances (`workers.links.hop_exchange` ends a stalled one).
    """
    fence_s: float = 10.0
    """A fence: for the step that it names to open here."""
    unreached_s: float = 1.0
    """Pause before a tied stage's member that could not be reached is tried again."""


class StageRuntime(HopRuntime):
    """A stage instance: its microbatches (`StageFlow`), and its part in the step transaction.

    Args:
        context: The incarnation and its surroundings.
        device: The device that computes.
        thread: The thread that computes.
        admitted: Called each time an order says that this instance is a member of its stage.
        cut_anew: Called once it is another unit, by the plan in force.
        times: How long orders wait.
    """

    machine: StageMachine

    def __init__(
        self,
        context: InstanceContext,
        *,
        device: torch.device,
        thread: ComputeThread,
        admitted: Callable[[], None],
        cut_anew: Callable[[TaskUnit], object],
        times: StageTimes = StageTimes(),
    ) -> None:
        super().__init__(context)
        unit = self.start.unit
        self.stage = unit.stage
        self.admitted = admitted
        self._cut_anew = cut_anew
        self._times = times
        self.thread = thread
        self.layers = StageCompute(self.start, device)
        self.state = StageState(self.bus, self.start, self.member, thread, self.layers, self._version_changed)
        self.machine = StageMachine(
            self.member,
            epoch=self.epoch,
            stage=unit.stage,
            last=unit.stage == self.start.stages - 1,
            binder=self.binder,
        )
        self.flow = StageFlow(self, self.machine, thread, self.layers, lambda: self.preparation.summed())
        self.preparation = Preparation(
            context,
            thread,
            self.layers,
            self.flow.load,
            lambda: (self.version, self.attempt),
            lambda transfer: self.track(self._deliver_sum(transfer)),
        )
        self.reduction = self.preparation.reduction
        self._applying = asyncio.Lock()
        self.copy_source = CopySource(
            lambda to, direction, step, tensors, rate: self.send_aside(
                to, direction, self.stage, step, tensors, learning_rate=rate
            ),
            self.state.snapshot,
        )
        self.followers = Followers(
            lambda to, transfer, direction, step, tensors, rate: self.send_aside(
                to, direction, self.stage, step, tensors, transfer=transfer, learning_rate=rate
            ),
            self.state.snapshot,
        )

        self.layer_change = LayerChange(
            self.start,
            device,
            thread,
            self.layers,
            lambda: self.version,
            lambda to, plan, kind, first, step, tensors, rate: self.send_aside(
                to, kind, self.stage, step, tensors, microbatch=first, transfer=plan, learning_rate=rate
            ),
            self.exchange.reconsider,
            self._between_plans,
            self._changed_layers,
        )
        self.exchange.plan = self.layer_change.plan

    @property
    def version(self) -> int:
        """The number of applied steps, which is the number of the step that this instance works on."""
        return self.machine.version

    step = version

    def _version_changed(self) -> None:
        if self.machine.version != self.state.version:
            self.run(self.machine.applied(self.state.version))
        self.stepped.set()
        self.exchange.reconsider()

    def run(self, effects: Iterable[Effect]) -> None:
        self.flow.run(effects)

    def offered(self, notice: MicrobatchNotice) -> str:
        """As the machine answers; layers, and state that is cut by another plan, are no matter of its."""
        if notice.direction in LAYERS:
            known = notice.epoch >= self.epoch and notice.sender not in self.machine.fenced
            return self.layer_change.offered(notice) if known else "stale"
        if self.layer_change.cuts_otherwise(notice):
            return "stale" if (notice.plan or 0) < self.layer_change.plan else "later"
        return super().offered(notice)

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Passes the tensors of an accepted offer to the replica buffer, the state or the machine."""
        if notice.direction in LAYERS:
            self.layer_change.received(notice, tensors)
        elif self.layer_change.cuts_otherwise(notice):
            pass
        elif notice.direction in COPIES and notice.stage != self.stage:
            self.store_replica(notice, tensors)
        elif notice.direction == "state":
            if self.machine.takes(notice):
                self.track(self.state.take(notice.step, list(tensors), lambda: self.machine.takes(notice)))
        elif notice.direction == "tied":
            self.preparation.arrived(notice, tensors)
        elif notice.direction == "redo":
            needed, rate = (lambda: self.machine.takes(notice)), notice.learning_rate
            self.track(self.state.redo(notice.step, tensors, needed, rate))
        else:
            self.run(self.machine.arrived(notice, tensors))

    def own_load(self) -> HopLoad | None:
        return HopLoad(open=self.machine.open, service_ms=self.flow.load.service_ms)

    def figures(self) -> dict[str, Any]:
        load, hops = self.flow.load, self.machine.hops.values()
        return {
            "step": self.version,
            "queue": self.thread.waiting,
            "in_flight": sum(hop.state is not MicrobatchState.ACCUMULATED for hop in hops),
            "microbatches": load.microbatches,
            "service_ms": load.service_ms,
            "forward_ms": load.forward_ms,
            "backward_ms": load.backward_ms,
            "reduce_ms": load.reduce_ms,
            "retained_bytes": sum(hop.retained_bytes for hop in hops),
            "stage_cost_ms": self.start.unit.requirements.cost_ms,
            "state_bytes": self.layers.state_bytes,
            "computed": self.thread.done,
            "computing_ms": self.thread.computing_ms,
            "obeys": self.thread.obeys,
            "waits_for": self.machine.waits_for(),
        }

    @property
    def totals(self) -> tuple[float, int]:
        return self.thread.busy_s, self.flow.load.tokens

    def orders(self) -> list[tuple[Subject, Order]]:
        return [
            (GROUP_FORM, self.form_group),
            (STEP_FENCE, self.fence),
            (STEP_ASSIGN, self.assign),
            (ADOPT, self.adopt),
            (STEP_PREPARE, self.prepare),
            (STEP_COMMIT, self.commit),
            (STEP_ABORT, self.abort),
            (STEP_STATUS, self.status),
            (STATE_SEND, self.send_state),
            (STATE_RESTORE, self.restore),
            (COPY_TO, self.keep_copy),
            (COPY_STATUS, self.copy_status),
            (COPY_SEND, self.send_copy),
            *self.state.orders(),
            *self.layer_change.orders(),
        ]

    # --- the step transaction ---------------------------------------------------------------------------
    async def form_group(self, order: GroupForm) -> GroupFormed:
        """Drops the previous reduction group and builds that of the ordered generation.

        This order admits a newcomer: it learns the attempt and the fenced members, and becomes active.
        """
        if order.generation < self.reduction.generation:
            raise Fenced(f"generation {order.generation} is older than {self.reduction.generation}")
        if order.attempt > self.attempt:
            await self.flow.forget(order.attempt)
        self._fence(order.fenced)
        self.machine.admitted(order.step, (order.epoch, order.attempt, order.round))
        self.followers.end(order.members, "it is a member of its stage")
        if order.generation > self.reduction.generation or self.reduction.group is None:
            self.preparation.release()
            await self.reduction.form(order)
        self.admitted()
        return GroupFormed(member=self.member, generation=self.reduction.generation)

    def _fence(self, members: Sequence[Member]) -> None:
        super()._fence(members)
        self.machine.fence(members)
        self.followers.end(members, "it is fenced")
        self.layer_change.fence(members)

    async def fence(self, order: StepFence) -> StepFenced:
        """Ignores the fenced incarnations from now on; answers with the hops held in the open step.

        It first waits until the step of the order is open here: a commit, or the admission of a newcomer, may
        be in progress.
        """
        self._fence(order.fenced)
        if self.reduction.includes(order.fenced):
            self.preparation.release()
        await self.state.until(
            lambda: (self.version, self.attempt) >= (order.step, order.attempt), self._times.fence_s
        )
        if (self.version, self.attempt) != (order.step, order.attempt):
            raise Conflict(
                f"fence in step {order.step}/{order.attempt}, but I am at {self.version}/{self.attempt}"
            )
        hops = self.machine.answer_round((order.epoch, order.attempt, order.round))
        self.exchange.reconsider()  # offers that others sent after their own answers may be accepted now
        return StepFenced(
            member=self.member,
            version=self.version,
            round=order.round,
            held=hops,
            claims=self.flow.claims(order.step, order.attempt),
        )

    async def assign(self, order: StepAssign) -> Ack:
        """Takes repaired paths: new neighbours of microbatches, or microbatches to own from now on."""
        if (order.step, order.attempt) == (self.version, self.attempt):
            key = (order.epoch, order.attempt, order.round)
            self.run(self.machine.assign(key, order.paths))
            self.exchange.reconsider()
        return Ack()

    async def adopt(self, order: Adopt) -> Adopted:
        """Obeys the epoch of a new leading orchestrator from now on, and answers with the present step."""
        self._take_epoch(order.epoch)
        await self.layer_change.adopted(order.plan, self.attempt + 1)
        return Adopted(
            member=self.member,
            plan=self.layer_change.plan,
            version=self.version,
            attempt=self.attempt,
            generation=self.reduction.generation,
            prepared=self.preparation.prepared.vote.step if self.preparation.prepared is not None else -1,
            fenced=tuple(self.machine.fenced),
        )

    async def prepare(self, order: StepPrepare) -> StepVote:
        """All-reduces a copy of the sum and votes with the microbatches in it. Idempotent.

        A group of one skips the all-reduce and finishes its sum in one task.
        """
        if (order.step, order.attempt) != (self.version, self.attempt):
            raise Fenced(
                f"prepare of step {order.step}/{order.attempt}, but I am at {self.version}/{self.attempt}"
            )
        request_progress.follow(self.thread.computed)
        return await self.preparation.vote(order)

    async def _deliver_sum(self, transfer: TensorTransfer) -> None:
        """Delivers the sum of what a tied stage shares: nobody asks for it again while the step is open.

        A receiver that can't be reached is reported each time, until it or this instance is fenced.
        """

        def needed() -> bool:
            at = (transfer.step, transfer.attempt)
            return at == (self.version, self.attempt) and transfer.receiver not in self.machine.fenced

        while needed():
            if await self.deliver(transfer, needed):
                return
            await asyncio.sleep(self._times.unreached_s)

    async def commit(self, order: StepCommit) -> StepApplied:
        """Applies the decision. Idempotent; it must match the prepared gradient (rule 6)."""
        if order.step + 1 == self.version:
            return StepApplied(member=self.member, version=self.version)
        if order.quarantined:
            return await self._skip(order)
        request_progress.follow(self.thread.computed)  # updating a large stage's weights takes long
        prepared = self.preparation.prepared
        if prepared is None or (order.step, order.attempt) != (prepared.vote.step, prepared.vote.attempt):
            raise Conflict(f"commit of step {order.step}/{order.attempt}, which I have not prepared")
        if order.generation != prepared.vote.generation or order.checksum != prepared.vote.checksum:
            raise Conflict(f"commit of step {order.step} names another gradient than the one prepared here")
        await self.state.sent()  # the present weights may still be on their way to a newcomer
        async with self._applying:
            if order.step + 1 == self.version:  # both a leader and its successor ordered this commit
                return StepApplied(member=self.member, version=self.version)
            if self.preparation.prepared is not prepared:
                raise Conflict(f"commit of step {order.step}/{order.attempt}, which was aborted meanwhile")
            await self.thread.order(lambda: self.layers.apply(order, prepared.gradients))
            self.preparation.forget()  # not earlier: until here this instance can still apply the decision
            # No await before this: hops read the version, and no snapshot may be ahead of the redos.
            self._end_step(order, prepared.gradients if order.action == "apply" else ())
        await self.state.move_to(self.version)
        return StepApplied(member=self.member, version=self.version)

    async def _skip(self, order: StepCommit) -> StepApplied:
        """Skips a step without an update, because one of its microbatches fails wherever it runs."""
        if order.action != "skip" or (order.step, order.attempt) != (self.version, self.attempt):
            raise Conflict(
                f"step {order.step}/{order.attempt} is to be left out, but I am at "
                f"{self.version}/{self.attempt}"
            )
        self.preparation.forget()
        await self.flow.forget(order.attempt)  # the sum must hold nothing of this step
        await self.thread.order(lambda: self.layers.skip(order.step))
        self._end_step(order, ())
        await self.state.move_to(self.version)
        return StepApplied(member=self.member, version=self.version)

    def _end_step(self, order: StepCommit, gradients: Sequence[Tensor]) -> None:
        """Begins the next step, and sends this one as a redo to followers and to the replica's holder.

        No gradients: the step was skipped.
        """
        self.run(self.machine.applied(order.step + 1))
        self.layer_change.applied(order.step, gradients, order.learning_rate)
        if self.followers or self.copy_source.holder is not None:
            redo = HostCopy(gradients, order.learning_rate)
            self.copy_source.applied(order.step, redo)
            self.followers.applied(order.step, redo)

    async def abort(self, order: StepAbort) -> StepAborted:
        """Forgets the open step below `order.attempt`: queues, sums, offers, group. Idempotent.

        Only members get this order; so a former newcomer accepts no state from others any more.
        """
        self._fence(order.fenced)
        if order.attempt > self.attempt:
            self.machine.is_member = True
            self.preparation.release()
            self.preparation.forget()
            await self.flow.forget(order.attempt)
            await self.state.notify()
            self.admitted()  # the next boundary may validate before the first group is formed
        return StepAborted(member=self.member, version=self.version)

    async def _between_plans(self, attempt: int, fenced: Sequence[Member]) -> None:
        """Drops whatever is cut by the plan that ends, between two steps."""
        self._fence(fenced)
        self.preparation.release()
        self.preparation.forget()
        self.followers.end_all("the job is cut otherwise now")
        self.copy_source.keep_at(None)
        self.replica_buffer.clear()
        await self.flow.forget(max(attempt, self.attempt))

    def _changed_layers(self, start: InstanceStart) -> None:
        """Another plan is in force here."""
        self.start, self.exchange.plan = start, start.plan
        self.exchange.reconsider()
        self._cut_anew(start.unit)

    async def status(self, query: StepStatus) -> StepStatusReply:
        """The claims and waiting microbatches of a step at this instance (repairs lost claims)."""
        return StepStatusReply(
            member=self.member,
            version=self.version,
            attempt=self.attempt,
            claims=self.flow.claims(query.step, query.attempt, evaluate=query.evaluate),
            waiting=self.flow.waiting()[:32],
        )

    # --- state ------------------------------------------------------------------------------------------
    async def build(self) -> None:
        """Builds the module and the optimizer; loads the job's initial weights if it names some."""
        await self.state.build()

    async def send_state(self, order: StateSend) -> StateReady:
        """Streams parameters and optimizer state to a newcomer.

        With `order.follow` the newcomer then follows each step. Otherwise (it can't keep up) the weights do
        not change until it has received them.
        """
        if order.follow:
            return await self.followers.send(order, self.member, self.machine.fenced, self._times.follow_s)
        self.state.check_version(order.version)
        self.followers.end([order.to], "it is sent the state as it is")
        async with self.state.sending():
            tensors = await self.state.tensors()
            outcome = await self.send_aside(
                order.to, "state", self.stage, self.version, tensors, transfer=order.transfer
            )
        if outcome != "delivered":
            raise Conflict(f"{order.to.sid} takes no state of version {order.version}: {outcome}")
        return StateReady(member=self.member, version=order.version, bytes=sum(t.nbytes for t in tensors))

    async def keep_copy(self, order: CopyTo) -> Ack:
        """Starts or stops keeping a replica of this stage's state at a peer. Idempotent."""
        self.copy_source.keep_at(order.holder)
        return Ack()

    async def restore(self, order: StateRestore) -> StateReady:
        """Loads the state of a checkpoint, or builds it again from the seed; then accepts no peer's state."""
        self.machine.is_member = True
        self.followers.end_all("all go back to a checkpoint")
        self.layer_change.drop("all go back to a checkpoint")
        restored = await self.state.restore(order)
        self.admitted()  # as by an abort
        return restored

    async def close(self) -> None:
        self.copy_source.close()
        self.followers.end_all("its source ends")
        self.layer_change.close()
        await self.state.checkpoints.close()
        await super().close()
        self.preparation.release()
