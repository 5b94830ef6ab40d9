"""A stage's copy at a peer: what is sent, what is kept, and that redo gives the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.data_plane import MicrobatchNotice
from schemas.errors import Conflict, PeerUnreachable
from schemas.step import Member, StepCommit
from tests.builders import steps
from tests.builders.graphs import start, unit
from tests.builders.jobs import gpt, spec
from workers.compute.optimizer import state_tensors
from workers.compute.stage_compute import StageCompute
from workers.links.hop_exchange import Outcome
from workers.links.peer_copy import (
    HELD_REDOS,
    SNAPSHOT_EVERY,
    CopyDirection,
    CopySource,
    HeldRedo,
    ReplicaBuffer,
)
from workers.links.redo_queue import QUEUED_REDOS
from workers.routing.next_hop import Binder
from workers.transaction.data_machine import DataMachine
from workers.transaction.stage_machine import StageMachine
from workers.transport.pinned_buffers import HostCopy

HOLDER, OTHER, LOST = (Member(sid=sid, incarnation="i") for sid in ("holder", "other", "lost"))
STATE = [torch.zeros(1)]
GRADIENTS = [torch.ones(1)]


# --- the holder -----------------------------------------------------------------------------------------
def test_a_snapshot_and_its_redos_reach_a_version() -> None:
    shelf = ReplicaBuffer()
    assert shelf.reach(1) == -1
    shelf.redo(1, 0, GRADIENTS)
    assert shelf.reach(1) == -1, "a redo without a snapshot is worth nothing"
    shelf.snapshot(1, 4, STATE)
    shelf.redo(1, 4, GRADIENTS, 0.5)
    shelf.redo(1, 5, [])
    shelf.redo(1, 4, GRADIENTS)  # again: held already
    assert shelf.reach(1) == 6
    assert shelf.reach(0) == -1
    held = shelf.get(1, 6)
    assert held is not None
    assert (held.version, held.reach, held.redos) == (4, 6, [HeldRedo(GRADIENTS, 0.5), HeldRedo([])])
    assert shelf.get(1, 5) is None
    assert shelf.get(1, 7) is None


def test_what_is_being_sent_does_not_grow() -> None:
    shelf = ReplicaBuffer()
    shelf.snapshot(1, 0, STATE)
    held = shelf.get(1, 0)
    shelf.redo(1, 0, GRADIENTS)
    assert held is not None
    assert held.redos == []


def test_a_gap_makes_the_copy_useless_until_the_next_snapshot() -> None:
    shelf = ReplicaBuffer()
    shelf.snapshot(1, 4, STATE)
    shelf.redo(1, 5, GRADIENTS)
    assert shelf.reach(1) == -1
    shelf.redo(1, 6, GRADIENTS)
    assert shelf.reach(1) == -1
    shelf.snapshot(1, 7, STATE)
    assert shelf.reach(1) == 7


def test_a_new_snapshot_takes_the_place_of_all_before_and_an_empty_one_of_everything() -> None:
    shelf = ReplicaBuffer()
    shelf.snapshot(1, 4, STATE)
    shelf.redo(1, 4, GRADIENTS)
    shelf.snapshot(1, 2, STATE)  # everyone went back to a checkpoint
    assert shelf.reach(1) == 2
    shelf.snapshot(1, 0, [])
    assert shelf.reach(1) == -1


def test_a_holder_is_bounded() -> None:
    shelf = ReplicaBuffer()
    shelf.snapshot(1, 0, STATE)
    for step in range(HELD_REDOS):
        shelf.redo(1, step, GRADIENTS)
    assert shelf.reach(1) == HELD_REDOS
    shelf.redo(1, HELD_REDOS, GRADIENTS)
    assert shelf.reach(1) == -1


# --- the source -----------------------------------------------------------------------------------------
class Wire:
    """What a source sends, and the version that its snapshots would show."""

    def __init__(self) -> None:
        self.version = 0
        self.sent: list[tuple[str, CopyDirection, int, bool]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.broken = False
        self.source = CopySource(self.send, self.snapshot)

    async def send(
        self,
        to: Member,
        direction: CopyDirection,
        step: int,
        tensors: Sequence[Tensor],
        learning_rate: float | None,
    ) -> Outcome:
        await self.open.wait()
        if self.broken:
            raise PeerUnreachable("gone")
        self.sent.append((to.sid, direction, step, bool(tensors)))
        return "delivered"

    async def snapshot(self) -> tuple[int, list[Tensor]]:
        return self.version, STATE

    def step(self, *, skipped: bool = False) -> None:
        self.version += 1
        self.source.applied(self.version - 1, HostCopy(() if skipped else GRADIENTS))

    async def settled(self) -> list[tuple[str, CopyDirection, int]]:
        """What was sent since the last call, once all of it is."""
        while (task := self.source._task) is not None and not task.done():
            await asyncio.wait([task])
        sent, self.sent = self.sent, []
        return [entry[:3] for entry in sent]


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    yield wire
    wire.source.close()


async def test_a_snapshot_comes_first_then_every_step_then_a_snapshot_again(wire: Wire) -> None:
    wire.step()
    assert await wire.settled() == [], "nobody keeps a copy yet"
    wire.source.keep_at(HOLDER)
    wire.source.keep_at(HOLDER)
    assert await wire.settled() == [("holder", "copy", 1)]
    for _ in range(SNAPSHOT_EVERY):
        wire.step()
        await asyncio.sleep(0)
    assert await wire.settled() == [("holder", "redo", 1 + step) for step in range(SNAPSHOT_EVERY)]
    wire.step()
    assert await wire.settled() == [("holder", "copy", SNAPSHOT_EVERY + 2)]
    wire.step(skipped=True)
    await wire.settled()
    wire.step()
    assert await wire.settled() == [("holder", "redo", SNAPSHOT_EVERY + 3)]


async def test_a_slow_holder_gets_a_snapshot_instead_of_a_long_queue(wire: Wire) -> None:
    wire.source.keep_at(HOLDER)
    await wire.settled()
    wire.open.clear()
    for _ in range(2 * QUEUED_REDOS + 3):
        wire.step()
        await asyncio.sleep(0)
        assert len(wire.source._queue) <= QUEUED_REDOS
    wire.open.set()
    last = 2 * QUEUED_REDOS + 3
    assert await wire.settled() == [("holder", "redo", 0), ("holder", "copy", last)]
    wire.step()
    assert await wire.settled() == [("holder", "redo", last)]


async def test_after_going_back_to_a_checkpoint_the_holder_gets_a_snapshot(wire: Wire) -> None:
    wire.source.keep_at(HOLDER)
    for _ in range(3):
        wire.step()
    await wire.settled()
    wire.version = 1
    wire.step()
    assert await wire.settled() == [("holder", "copy", 2)]


async def test_an_unreachable_holder_gets_all_of_it_after_the_next_step(wire: Wire) -> None:
    wire.source.keep_at(HOLDER)
    await wire.settled()
    wire.broken = True
    wire.step()
    assert await wire.settled() == []
    wire.broken = False
    wire.step()
    assert await wire.settled() == [("holder", "copy", 2)]


async def test_another_holder_gets_all_of_it_and_the_one_before_forgets(wire: Wire) -> None:
    wire.source.keep_at(HOLDER)
    await wire.settled()
    wire.open.clear()
    wire.step()
    await asyncio.sleep(0)  # on its way to one that no longer counts
    wire.source.keep_at(OTHER)
    wire.open.set()
    assert await wire.settled() == [("other", "copy", 1), ("holder", "copy", 0)]
    wire.source.keep_at(None)
    wire.step()
    assert await wire.settled() == [("other", "copy", 0)]
    assert not len(wire.source._queue)


# --- who takes copies -----------------------------------------------------------------------------------
def notice(direction: str, *, epoch: int = 1, sender: Member = OTHER) -> MicrobatchNotice:
    return steps.notice(sender, HOLDER, direction=direction, epoch=epoch, step=900)


@pytest.mark.parametrize("kind", ["stage", "data"])
def test_copies_are_taken_in_any_step_and_attempt_but_not_from_the_fenced(kind: str) -> None:
    machine: StageMachine | DataMachine
    if kind == "stage":
        machine = StageMachine(HOLDER, epoch=1, stage=0, last=False, binder=Binder("a"))
    else:
        machine = DataMachine(HOLDER, epoch=1, binder=Binder("a"))
    machine.attempt = 3
    machine.fence([LOST])
    for direction in ("copy", "redo"):
        assert machine.offered(notice(direction)) == "accepted"
        assert machine.offered(notice(direction, epoch=0)) == "stale"
        assert machine.offered(notice(direction, sender=LOST)) == "stale"


# --- bits -----------------------------------------------------------------------------------------------
SPEC = spec(
    model=gpt(layers=1),
    data={"source": "stdlib:", "sample_tokens": 8},
    training={"steps": 9, "microbatches": 2, "microbatch_samples": 1, "schedule": {"warmup_steps": 3}},
)


def stage() -> StageCompute:
    compute = StageCompute(start(unit(last_layer=3), spec=SPEC), torch.device("cpu"))
    compute.build()
    return compute


def commit(step: int, **more: Any) -> StepCommit:
    action = "skip" if step == 5 else "apply"
    return steps.commit(step, clip=0.37 if step % 2 else 1.0, action=action, **more)


def gradients(compute: StageCompute, step: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return [torch.randn(weight.shape, generator=drawn) for weight in compute.parameters]


def bits(compute: StageCompute) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in state_tensors(compute.module, compute.optimizer)]


def test_a_snapshot_and_redos_give_the_bits_of_the_original() -> None:
    """AdamW, a clip that is not 1 in every other step, a warm-up, one skipped step."""
    original, copied = stage(), stage()
    shelf = ReplicaBuffer()
    for step in range(9):
        order, mean = commit(step, learning_rate=1 / (7 + step)), gradients(original, step)
        original.apply(order, mean)
        shelf.redo(0, step, mean if order.action == "apply" else [], order.learning_rate)
        if step == 1:
            shelf.snapshot(0, *original.snapshot())
    held = shelf.get(0, 9)
    assert held is not None
    assert (held.version, len(held.redos)) == (2, 7)
    copied.load(held.version, held.tensors)
    assert bits(copied) != bits(original)
    for step, redo in enumerate(held.redos, held.version):
        copied.redo(step, redo.gradients, redo.learning_rate)
    assert copied.version == original.version == 9
    assert bits(copied) == bits(original)


def test_a_snapshot_does_not_change_with_the_stage() -> None:
    compute = stage()
    version, tensors = compute.snapshot()
    before = [tensor.clone() for tensor in tensors]
    compute.apply(commit(0), gradients(compute, 0))
    assert version == 0
    assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))


def test_gradients_of_another_stage_are_refused_and_change_nothing() -> None:
    compute = stage()
    before = bits(compute)
    with pytest.raises(Conflict, match="another stage"):
        compute.redo(0, [torch.ones(3)])
    assert (bits(compute), compute.version) == (before, 0)
