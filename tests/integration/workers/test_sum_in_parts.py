"""Members that sum and finish a part each have what each would have of the whole sum, to the bit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from schemas.errors import PeerUnreachable
from tests.conftest import Connect
from tests.integration.workers.test_reduction import MEMBERS, build
from workers.compute.gradient_sum import GradientSum
from workers.compute.sum_in_parts import SumInParts
from workers.fixed_point.packing import CHUNK
from workers.links.reduction import GroupExchange, ReductionGroup

M = 6
SEED = 20_261_127
SHAPES = {
    "nothing": [],
    "less than a chunk": [(7, 3), (), (11,)],
    "a chunk": [(CHUNK - 3,), (3,)],
    "many": [(300, 401), (CHUNK,), (1,), (257, 500), (13,)],
}


def gradients(shapes: list[tuple[int, ...]], microbatch: int) -> list[Tensor]:
    """As they are, but for some large ones in the first parameter: chunks need different widths."""
    generator = torch.Generator().manual_seed(SEED + microbatch)
    drawn = [torch.randn(shape, generator=generator) * 1e-3 for shape in shapes]
    if drawn:
        drawn[0] *= 10.0 ** (microbatch % 5)
    return drawn


def total(shapes: list[tuple[int, ...]], microbatches: range, *, compiled: bool = True) -> GradientSum:
    made = GradientSum([torch.zeros(shape) for shape in shapes], True, M, compiled=compiled)
    for microbatch in microbatches:
        made.add(microbatch, gradients(shapes, microbatch))
    return made


async def reduced(group: ReductionGroup, own: GradientSum) -> SumInParts:
    parts = own.begin_parts(group.rank, group.parts or (1.0,) * len(group.members))
    await group.exchange(parts.exchange)
    return parts


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
async def test_all_have_the_means_and_the_checksum_of_the_whole(
    connect: Connect, held: Any, shapes: list[tuple[int, ...]], compiled: bool
) -> None:
    bus = await connect("replicas")
    before = held()
    means, checksum = total(shapes, range(M)).finish(total(shapes, range(M)).total)
    uneven = (0.0, 5.0, 1.5)
    for generation, (members, shares) in enumerate([(MEMBERS, ()), (MEMBERS[:3], uneven), (MEMBERS[:2], ())]):
        groups = await build(bus, members, generation, parts=shares)
        # The last member has no microbatch: its sum is zero.
        owns = [range(rank, M, len(groups) - 1) for rank in range(len(groups) - 1)] + [range(0)]
        sums = [total(shapes, own, compiled=compiled) for own in owns]
        for _ in range(2):  # the second one reuses the memory of the first
            found = await asyncio.gather(*map(reduced, groups, sums))
            for own, parts, microbatches in zip(sums, found, owns, strict=True):
                assert parts.microbatches == frozenset(microbatches)
                own_means, own_checksum = own.finish_parts(parts)
                assert own_checksum == checksum
                assert all(torch.equal(*pair) for pair in zip(own_means, means, strict=True))
        for group in groups:
            group.release()
            await group.released_fully()
    del groups, group
    await before.nothing_more()


async def test_a_failed_reduction_leaves_the_sum_and_its_memory_alone(connect: Connect) -> None:
    shapes = SHAPES["many"]
    first, second = await build(await connect("replicas"), MEMBERS[:2], 30, timeout_s=0.5)
    own = total(shapes, range(M))
    before = own.copy_for_reduce()
    parts = own.begin_parts(0, (1.0, 1.0))
    with pytest.raises(PeerUnreachable):
        await first.exchange(parts.exchange)
    assert first.released
    assert torch.equal(own.total, before)
    assert own.begin_parts(0, (1.0, 1.0)).buffers is not parts.buffers, "its thread may still write there"
    second.release()


async def test_means_that_arrive_otherwise_than_sent_end_the_group(connect: Connect) -> None:
    """Nobody but the owner has the sum of a part: without a look, replicas would drift apart unnoticed."""

    class Damaging(GroupExchange):
        swaps = 0

        def __init__(self, line: GroupExchange) -> None:
            self._line = line

        def swap(self, sent: Any, received: Any) -> None:
            self._line.swap(sent, received)
            self.swaps += 1
            if self.swaps == 3:
                received[1][-8] ^= 1

    shapes = SHAPES["many"]
    groups = await build(await connect("replicas"), MEMBERS[:2], 40)
    sums = [total(shapes, range(rank, M, 2)) for rank in range(2)]
    damaged, whole = (own.begin_parts(rank, (1.0, 1.0)) for rank, own in enumerate(sums))
    outcomes = await asyncio.gather(
        groups[0].exchange(lambda line: damaged.exchange(Damaging(line))),
        groups[1].exchange(whole.exchange),
        return_exceptions=True,
    )
    assert isinstance(outcomes[0], PeerUnreachable)
    assert "the means of rank 1 arrived otherwise than they were sent" in outcomes[0].text
    for group in groups:
        group.release()
