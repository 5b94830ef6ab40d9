"""A stage's part in the step transaction (DESIGN §5): groups, prepare, commit, abort, state.

The set of summed microbatches is kept by the thread that sums, so that a vote can't name what is not in
the sum; every order is idempotent and carries the epoch, so that an old orchestrator decides nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from schemas.errors import Conflict, Fenced
from schemas.step import (
    CheckpointOrder,
    Exported,
    ExportOrder,
    GroupForm,
    GroupFormed,
    StateReady,
    StateRestore,
    StateSend,
    StateWait,
    StepAbort,
    StepAborted,
    StepApplied,
    StepCommit,
    StepPrepare,
    StepStatus,
    StepStatusReply,
    StepVote,
)
from workers.compute import Priority
from workers.reduction import ReductionGroup, reduce_timeout_s
from workers.stage_flow import StageFlow


@dataclass(slots=True)
class Prepared:
    """A reduced gradient waiting for the decision."""

    step: int
    attempt: int
    generation: int
    gradients: list[Tensor]
    vote: StepVote


@dataclass(kw_only=True)
class StageRuntime(StageFlow):
    """A stage instance: its microbatches (`StageFlow`), and its part in the step's transaction."""

    address: str = "127.0.0.1"
    ports: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.group: ReductionGroup | None = None
        self.generation = -1
        self._prepared: Prepared | None = None

    # --- the step transaction ---------------------------------------------------------------------------
    async def form_group(self, order: GroupForm) -> GroupFormed:
        """Builds the reduction group of a generation; the one before is dropped first."""
        self._check_epoch(order.epoch)
        if self.generation != order.generation or (self.group is None):
            if order.generation < self.generation:
                raise Fenced(f"generation {order.generation} is older than {self.generation}")
            self._release_group()
            self.generation = order.generation
            self.group = await ReductionGroup.build(
                self.bus,
                job=self.job,
                stage=self.stage,
                generation=order.generation,
                members=order.members,
                me=self.member,
                epoch=self.epoch,
                address=self.address,
                ports=self.ports,
            )
        return GroupFormed(member=self.member, generation=self.generation)

    async def prepare(self, order: StepPrepare) -> StepVote:
        """All-reduces a copy of the sum and votes with what the sum holds. Idempotent.

        A group of one has nobody to add: its sum is taken as it is, in one go.
        """
        self._check_epoch(order.epoch)
        if (order.step, order.attempt) != (self.version, self.attempt):
            raise Fenced(
                f"prepare of step {order.step}/{order.attempt}, but I am at {self.version}/{self.attempt}"
            )
        if order.generation != self.generation or self.group is None:
            raise Conflict(f"prepare in generation {order.generation}, but my group is {self.generation}")
        if (
            self._prepared
            and self._prepared.generation == order.generation
            and self._prepared.step == order.step
        ):
            return self._prepared.vote
        reduce_ms = 0.0
        if len(self.group.members) == 1:
            microbatches, (gradients, checksum, norms) = await self.compute.submit(
                Priority.ORDER, self.trained.finish_alone
            )
        else:
            began = time.perf_counter()
            microbatches, flat = await self.compute.submit(Priority.ORDER, self.trained.copy_sum)
            patience_s = reduce_timeout_s(flat.numel() * flat.element_size())
            reduced = await self.group.all_reduce(flat, timeout_s=patience_s)
            reduce_ms = (time.perf_counter() - began) * 1e3
            if (order.step, order.attempt) != (self.version, self.attempt):
                raise Fenced("aborted while reducing")
            gradients, checksum, norms = await self.compute.submit(
                Priority.ORDER, lambda: self.trained.finish_sum(reduced)
            )
        self.load.reduce_ms = reduce_ms
        vote = StepVote(
            member=self.member,
            step=order.step,
            attempt=order.attempt,
            generation=order.generation,
            microbatches=tuple(sorted(microbatches)),
            checksum=checksum,
            squared_norms=norms,
            reduce_ms=reduce_ms,
        )
        if (order.step, order.attempt) == (self.version, self.attempt):
            self._prepared = Prepared(order.step, order.attempt, order.generation, gradients, vote)
        return vote

    async def commit(self, order: StepCommit) -> StepApplied:
        """Applies the decision. Idempotent; must match what was prepared (rule 6)."""
        self._check_epoch(order.epoch)
        if order.step + 1 == self.version:
            return StepApplied(member=self.member, version=self.version)
        prepared = self._prepared
        if prepared is None or (order.step, order.attempt) != (prepared.step, prepared.attempt):
            raise Conflict(f"commit of step {order.step}/{order.attempt}, which I have not prepared")
        if order.generation != prepared.generation or order.checksum != prepared.vote.checksum:
            raise Conflict(f"commit of step {order.step} names another gradient than the one prepared here")
        self._prepared = None
        await self.compute.submit(Priority.ORDER, lambda: self.trained.apply(order, prepared.gradients))
        self.state.version = order.step + 1  # before anything can be awaited: hops look at it
        self.next_step()
        await self.state.move_to(self.version)
        return StepApplied(member=self.member, version=self.version)

    async def abort(self, order: StepAbort) -> StepAborted:
        """Forgets the open step below `order.attempt`: queues, sums, offers, group. Idempotent."""
        self._check_epoch(order.epoch)
        if self.member in order.fenced:
            self.failed(Fenced(f"{self.member.sid} {self.member.incarnation} was replaced"))
        for member in order.fenced:
            self.binder.fence(member)
            if self.exchange is not None:
                self.exchange.fence(member)
        if order.attempt > self.attempt:
            self._prepared = None
            self._release_group()
            await self.forget(order.attempt)
        return StepAborted(member=self.member, version=self.version)

    async def status(self, query: StepStatus) -> StepStatusReply:
        """What this instance holds of the asked step (repairs lost claims)."""
        return StepStatusReply(
            member=self.member,
            version=self.version,
            attempt=self.attempt,
            claims=self.claims(query.step, query.attempt, evaluate=query.evaluate),
            waiting=self.waiting()[:32],
        )

    # --- state ------------------------------------------------------------------------------------------
    async def build(self) -> None:
        """Builds the module and the optimizer; takes the job's initial weights where it names some."""
        await self.state.build()

    async def send_state(self, order: StateSend) -> StateReady:
        """Streams parameters and optimizer state to a newcomer (between steps: weights do not change)."""
        self._check_version(order.epoch, order.version)
        assert self.exchange is not None
        tensors = await self.state.tensors()
        await self.exchange.send(
            direction="state",
            receiver=order.to,
            stage=self.stage,
            step=self.version,
            attempt=self.attempt,
            microbatch=0,
            tensors=tensors,
        )
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return StateReady(member=self.member, version=self.version, bytes=size)

    async def wait_state(self, order: StateWait) -> StateReady:
        """Answers once this instance holds the state of `order.version`."""
        self._check_epoch(order.epoch)
        return await self.state.wait_for(order.version)

    async def restore(self, order: StateRestore) -> StateReady:
        """Takes the state of a checkpoint, or builds it again from the seed."""
        self._check_epoch(order.epoch)
        return await self.state.restore(order)

    async def checkpoint(self, order: CheckpointOrder) -> Exported:
        """Writes parameters and optimizer state at `order.version` to the artifact store."""
        self._check_version(order.epoch, order.version)
        return await self.state.checkpoint(order)

    async def export_weights(self, order: ExportOrder) -> Exported:
        """Writes the weights as one safetensors shard to the artifact store."""
        self._check_version(order.epoch, order.version)
        return await self.state.export(order)

    def _check_version(self, epoch: int, version: int) -> None:
        self._check_epoch(epoch)
        if version != self.version:
            raise Conflict(f"asked for version {version}, but I am at {self.version}")

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced(f"epoch {epoch} speaks to an instance of epoch {self.epoch}")

    def _release_group(self) -> None:
        if self.group is not None:
            self.group.release()
            self.group = None

    async def close(self) -> None:
        await super().close()
        self._release_group()
