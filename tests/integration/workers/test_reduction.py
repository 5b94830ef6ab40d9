"""All-reduce groups per generation (DESIGN §5 rule 8): exact sums, and nobody hangs for a dead member."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from schemas.errors import BadInput, PeerUnreachable
from schemas.step import Member
from tests.conftest import Connect
from tests.patience import NEVER_S, PATIENCE_S
from workers.links.reduction import ReductionGroup
from workers.transport.gloo import GroupConfig

MEMBERS = [Member(sid=f"replica-{number}", incarnation="1") for number in range(4)]


async def build(
    bus: Bus, members: list[Member], generation: int, *, parts: Sequence[float] = (), **options: Any
) -> list[ReductionGroup]:
    return list(
        await asyncio.gather(
            *(
                ReductionGroup.build(
                    bus,
                    job="job",
                    stage=0,
                    generation=generation,
                    members=members,
                    me=member,
                    parts=parts,
                    config=GroupConfig(**options),
                )
                for member in members
            )
        )
    )


async def test_sums_are_exact_and_the_next_generation_leaves_the_dead_out(
    connect: Connect, held: Any
) -> None:
    bus = await connect("replicas")
    before = held()
    for generation, members in enumerate([MEMBERS, MEMBERS[:3], MEMBERS[1:], MEMBERS[:2]]):
        groups = await build(bus, members, generation)
        large = 2**40
        shares = [torch.arange(100_000) * (rank + large) for rank in range(len(members))]
        expected = torch.stack(shares).sum(0)
        reduced = await asyncio.gather(
            *(group.all_reduce(share) for group, share in zip(groups, shares, strict=True))
        )
        assert all(torch.equal(one, expected) for one in reduced)
        floats = await asyncio.gather(*(group.all_reduce(torch.ones(3, 5)) for group in groups))
        assert all(torch.equal(one, torch.full((3, 5), float(len(members)))) for one in floats)
        for group in groups:
            group.release()
            group.release()
            await group.released_fully()
    del groups, group
    await before.nothing_more()


async def test_a_group_of_one_changes_nothing_and_needs_no_connection(connect: Connect, held: Any) -> None:
    bus = await connect("replicas")
    before = held()
    [group] = await build(bus, MEMBERS[:1], 0)
    tensor = torch.arange(5)
    assert torch.equal(await group.all_reduce(tensor), torch.arange(5))
    await before.nothing_more()
    group.release()
    with pytest.raises(PeerUnreachable, match="released"):
        await group.all_reduce(tensor)


async def test_release_frees_who_waits_for_a_member_that_does_not_come(connect: Connect, held: Any) -> None:
    bus = await connect("replicas")
    before = held()
    groups = await build(bus, MEMBERS, 10, timeout_s=NEVER_S)
    waiting = [asyncio.create_task(group.all_reduce(torch.ones(10))) for group in groups[:3]]
    done, _ = await asyncio.wait(waiting, timeout=0.3)
    assert not done  # they do wait
    for group in groups:
        group.release()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), PATIENCE_S)
    assert all(isinstance(result, PeerUnreachable) for result in results)
    del groups, group, waiting, results, done, _
    await before.nothing_more()


async def test_a_late_member_is_an_error_after_the_timeout(connect: Connect) -> None:
    groups = await build(await connect("replicas"), MEMBERS[:2], 20, timeout_s=0.5)
    began = time.monotonic()
    with pytest.raises(PeerUnreachable):
        await groups[0].all_reduce(torch.ones(10))
    assert time.monotonic() - began > 0.4
    assert groups[0].released
    await groups[0].released_fully()
    with pytest.raises(PeerUnreachable):  # the group is over for the other as well
        await groups[1].all_reduce(torch.ones(10))


async def test_a_member_that_never_comes_fails_the_build(connect: Connect, held: Any) -> None:
    bus = await connect("replicas")
    before = held()
    with pytest.raises(PeerUnreachable, match="was not built"):
        await ReductionGroup.build(
            bus,
            job="job",
            stage=0,
            generation=30,
            members=MEMBERS,
            me=MEMBERS[0],
            config=GroupConfig(build_timeout_s=0.5),
        )
    await before.nothing_more()


async def test_the_same_name_may_be_met_under_again(connect: Connect) -> None:
    """After a build that failed, and after a group that was released: nobody connects to what is gone."""
    bus = await connect("replicas")
    with pytest.raises(PeerUnreachable):
        await ReductionGroup.build(
            bus,
            job="job",
            stage=0,
            generation=35,
            members=MEMBERS[:2],
            me=MEMBERS[0],
            config=GroupConfig(build_timeout_s=0.3),
        )
    for _ in range(3):
        groups = await build(bus, MEMBERS[:2], 35)
        sums = await asyncio.gather(*(group.all_reduce(torch.tensor([1])) for group in groups))
        assert [int(one) for one in sums] == [2, 2]
        for group in groups:
            group.release()
            await group.released_fully()


async def test_only_members_and_only_summable_types(connect: Connect) -> None:
    bus = await connect("replicas")
    stranger = Member(sid="stranger", incarnation="1")
    with pytest.raises(BadInput, match="not a member"):
        await ReductionGroup.build(bus, job="job", stage=0, generation=40, members=MEMBERS, me=stranger)
    [group] = await build(bus, MEMBERS[:1], 40)
    with pytest.raises(BadInput, match="bfloat16"):
        await group.all_reduce(torch.ones(1, dtype=torch.bfloat16))


async def test_one_of_four_is_killed_and_the_others_come_free(
    connect: Connect, server: EmbeddedServer, spawn: Any
) -> None:
    """Three processes reduce, the fourth has built the group and dies: errors, not hangs, and generation
    51 of the three survivors sums."""
    bus = await connect("orchestrator")
    children = [
        await spawn("reduction_peer.py", server.url, "job", rank, 4, 50, "absent" if rank == 3 else "sum", 4)
        for rank in range(4)
    ]
    await asyncio.gather(*(child.event("built") for child in children))
    await children[3].kill()
    failed = await asyncio.gather(*(child.event("failed") for child in children[:3]))
    assert len(failed) == 3
    survivors = await build(bus, MEMBERS[:3], 51)
    sums = await asyncio.gather(*(group.all_reduce(torch.tensor([2])) for group in survivors))
    assert [int(one) for one in sums] == [6, 6, 6]
    for group in survivors:
        group.release()
        await group.released_fully()
