"""The prepare of a stage that shares parameters with others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from bus.wire import request_progress
from bus.wire.request_progress import RequestProgress
from schemas.data_plane import MicrobatchNotice
from schemas.errors import Conflict
from schemas.step import Member, StepPrepare, StepVote, TiedStage
from workers.links.offers import TensorTransfer
from workers.stage.preparation import Preparation, add_tied
from workers.stage.stage_runtime import StageRuntime

A, B, C = (Member(sid=name, incarnation="i1") for name in "abc")


class Thread:
    def order(self, task: Callable[[], Any]) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(task())
        return future


class Layers:
    """Two parameters of two elements each; stage 2 shares the second one, and no other stage shares any."""

    own_schedule, scales_loss, is_tied = None, False, False

    def __init__(self) -> None:
        self.finished = 0
        self.sum = SimpleNamespace(microbatches=frozenset[int](), in_parts=False)

    def finish_alone(self) -> tuple[frozenset[int], tuple[list[Tensor], str, tuple[float, ...]]]:
        self.finished += 1
        return self.sum.microbatches, ([torch.ones(4)], f"finish {self.finished}", (1.0,))

    def copy_sum(self) -> tuple[frozenset[int], Tensor]:
        return frozenset({0}), torch.tensor([1, 2, 3, 4])

    def shared_with(self, tied: TiedStage) -> list[slice]:
        return [slice(2, 4)] if tied.stage == 2 else []

    def finish_reduced(self, reduced: Tensor) -> tuple[list[Tensor], str, tuple[float, ...]]:
        return [reduced], str(reduced.tolist()), (1.0,)


class Group:
    members = (A,)

    async def all_reduce(self, flat: Tensor, timeout_s: float) -> Tensor:
        return flat

    def release(self) -> None:
        pass


@pytest.fixture
def sent() -> list[TensorTransfer]:
    return []


@pytest.fixture
def layers() -> Layers:
    return Layers()


@pytest.fixture
def opened() -> list[tuple[int, int]]:
    """The open steps, the present one last."""
    return [(3, 0)]


@pytest.fixture
async def prepares(sent: list[TensorTransfer], layers: Layers, opened: list[tuple[int, int]]) -> Preparation:
    context = SimpleNamespace(
        member=A,
        start=SimpleNamespace(
            unit=SimpleNamespace(stage=0),
            spec=SimpleNamespace(training=SimpleNamespace(microbatches=1)),
        ),
        links=SimpleNamespace(timeout_s=1.0, waiting_alive_s=0.0),
    )
    parts: tuple[Any, ...] = (context, Thread(), layers, SimpleNamespace(reduce_ms=0.0))
    made = Preparation(*parts, lambda: opened[-1], sent.append)
    made.reduction.group, made.reduction.generation = cast(Any, Group()), 1
    return made


def order(*tied: tuple[int, tuple[Member, ...]]) -> StepPrepare:
    return StepPrepare(
        job="j",
        epoch=1,
        step=3,
        attempt=0,
        generation=1,
        tied=tuple(
            TiedStage(stage=stage, first_layer=stage, last_layer=stage + 1, receivers=members)
            for stage, members in tied
        ),
    )


def arrive(prepares: Preparation, stage: int, *sums: int) -> None:
    notice = cast(MicrobatchNotice, SimpleNamespace(step=3, attempt=0, stage=stage))
    prepares.arrived(notice, [torch.tensor(sums)])


async def started(prepares: Preparation, prepare: StepPrepare) -> asyncio.Task[StepVote]:
    task = asyncio.create_task(prepares.vote(prepare))
    for _ in range(20):
        await asyncio.sleep(0)
    return task


async def test_the_sum_of_a_tied_stage_is_added_and_both_have_its_checksum(
    prepares: Preparation, sent: list[TensorTransfer]
) -> None:
    voting = await started(prepares, order((2, (B,))))
    assert [(transfer.receiver, transfer.tensors[0].tolist()) for transfer in sent] == [(B, [3, 4])]
    arrive(prepares, 2, 10, 20)
    vote = await voting
    assert vote.checksum == "[1, 2, 13, 24]"
    theirs = torch.tensor([7, 10, 20])
    assert vote.tied == ((2, add_tied(theirs, 2, {0: [slice(1, 3)]}, {0: torch.tensor([3, 4])})[0][1]),)


async def test_a_stage_with_which_no_trained_parameter_is_shared_is_not_waited_for(
    prepares: Preparation, sent: list[TensorTransfer]
) -> None:
    """Its parameter is frozen, or the two are tied by a third stage."""
    vote = await prepares.vote(order((1, (B,))))
    assert (vote.checksum, vote.tied, sent) == ("[1, 2, 3, 4]", (), [])


async def test_whoever_waits_for_a_tied_stage_is_not_silent(
    prepares: Preparation,
) -> None:
    """A stage that was lost may come back after minutes: at the order's deadline others would be lost."""
    progress = [RequestProgress(), RequestProgress()]
    voting = []
    for asker, members in zip(progress, ((B,), (C,)), strict=True):
        request_progress.present.set(asker)
        voting.append(await started(prepares, order((2, members))))
    for _ in range(100):
        await asyncio.sleep(0)
    assert all(asker.so_far > 3 for asker in progress)
    arrive(prepares, 2, 10, 20)
    assert await voting[0] == await voting[1]


async def test_who_joins_a_tied_stage_is_sent_the_sum(
    prepares: Preparation, sent: list[TensorTransfer]
) -> None:
    first = await started(prepares, order((2, (B,))))
    again = await started(prepares, order((2, (C,))))
    assert [transfer.receiver for transfer in sent] == [B, C]
    arrive(prepares, 2, 10, 20)
    assert await first == await again


async def test_a_prepare_that_waits_ends_with_its_group(prepares: Preparation) -> None:
    voting = await started(prepares, order((2, (B,))))
    prepares.release()
    with pytest.raises(Conflict, match="given up"):
        await voting


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_three_stages_come_to_the_same_bits(kind: torch.dtype) -> None:
    """Float sums depend on their order: copies of one parameter would drift apart."""
    generator = torch.Generator().manual_seed(0)
    sums = [(torch.randn(1000, generator=generator) * 1e3).to(kind) for _ in range(3)]
    totals = [sums[stage].clone() for stage in range(3)]
    checksums = []
    for stage, total in enumerate(totals):
        others = [other for other in range(3) if other != stage]
        parts = {other: [slice(0, 1000)] for other in others}
        checksums += add_tied(total, stage, parts, {other: sums[other] for other in others})
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], totals[2])
    assert len({checksum for _, checksum in checksums}) == 1


async def test_a_sum_is_offered_until_the_member_of_the_tied_stage_has_it() -> None:
    outcomes = [False, False, True]
    transfer = TensorTransfer(direction="tied", receiver=B, stage=0, step=3)

    async def deliver(given: TensorTransfer, needed: Callable[[], bool]) -> bool:
        assert given is transfer
        assert needed()
        return outcomes.pop(0)

    runtime = SimpleNamespace(
        version=3,
        attempt=0,
        machine=SimpleNamespace(fenced=set()),
        deliver=deliver,
        _times=SimpleNamespace(unreached_s=0.0),
    )
    await StageRuntime._deliver_sum(cast(StageRuntime, runtime), transfer)
    assert outcomes == []
    runtime.version = 4
    await StageRuntime._deliver_sum(cast(StageRuntime, runtime), transfer)


async def test_a_single_member_finishes_its_sum_before_the_order(
    prepares: Preparation, layers: Layers
) -> None:
    prepares.summed()
    assert layers.finished == 0, "the sum has no microbatch yet"
    layers.sum.microbatches = frozenset({0})
    prepares.summed()
    prepares.summed()  # a claim is reported again after a repair
    assert layers.finished == 1
    vote = await prepares.vote(order())
    assert (vote.checksum, vote.microbatches, layers.finished) == ("finish 1", (0,), 1)


async def test_what_was_finished_in_an_earlier_attempt_is_not_voted_for(
    prepares: Preparation, layers: Layers, opened: list[tuple[int, int]]
) -> None:
    layers.sum.microbatches = frozenset({0})
    prepares.summed()
    opened.append((3, 1))
    vote = await prepares.vote(order().model_copy(update={"attempt": 1}))
    assert vote.checksum == "finish 2"


@pytest.mark.parametrize("why", ["tied", "replicas"])
async def test_a_sum_that_others_add_to_is_not_finished_early(
    prepares: Preparation, layers: Layers, why: str
) -> None:
    layers.sum.microbatches = frozenset({0})
    if why == "tied":
        layers.is_tied = True
    else:
        cast(Any, prepares.reduction.group).members = (A, B)
    prepares.summed()
    assert layers.finished == 0
