"""Newcomers that follow: what they are sent while steps are applied, and that they get the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from torch import Tensor

from schemas.data_plane import MicrobatchNotice
from schemas.errors import Conflict, PeerUnreachable
from schemas.step import Member
from tests.builders import steps
from tests.patience import PATIENCE_S
from tests.unit.workers.links.test_peer_copy import bits, commit, gradients, stage
from workers.compute.stage_compute import StageCompute
from workers.links.hop_exchange import Outcome
from workers.links.redo_queue import QUEUED_REDOS
from workers.routing.next_hop import Binder
from workers.stage.followers import FollowDirection, Follower, Followers
from workers.transaction.stage_machine import StageMachine
from workers.transport.pinned_buffers import HostCopy

SOURCE, NEWCOMER, OTHER = (Member(sid=sid, incarnation="i") for sid in ("source", "newcomer", "other"))


class Pair:
    """A stage that trains, another one that follows it, and the wire between them, which can be held."""

    def __init__(self) -> None:
        self.source, self.newcomer = stage(), stage()
        self.sent: list[tuple[FollowDirection, int]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.outcome: Outcome = "delivered"
        self.followers = Followers(self.send, self.snapshot)

    async def send(
        self,
        to: Member,
        transfer: int,
        direction: FollowDirection,
        step: int,
        tensors: Sequence[Tensor],
        learning_rate: float | None,
    ) -> Outcome:
        await self.open.wait()
        self.sent.append((direction, step))
        if direction == "state":
            self.newcomer.load(step, tensors)
        else:
            assert self.newcomer.version == step, "in order, and none is missing"
            self.newcomer.redo(step, tensors, learning_rate)
        return self.outcome

    async def snapshot(self) -> tuple[int, list[Tensor]]:
        return self.source.snapshot()

    async def step(self) -> None:
        """As a commit does: one of them leaves its step out."""
        order = commit(self.source.version, learning_rate=1 / (7 + self.source.version))
        mean = gradients(self.source, order.step)
        self.source.apply(order, mean)
        self.followers.applied(
            order.step, HostCopy(mean if order.action == "apply" else (), order.learning_rate)
        )
        await asyncio.sleep(0)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    pair.followers.end_all("the test is over")


async def caught_up(follower: Follower) -> int:
    return await follower.caught_up(PATIENCE_S)


async def test_a_newcomer_has_the_bits_of_its_source_in_every_step(pair: Pair) -> None:
    """With AdamW, a clip, a warm-up, a step that is left out; and the snapshot is overtaken by a step."""
    pair.open.clear()
    follower = pair.followers.follow(NEWCOMER, 1)
    await asyncio.sleep(0)
    await pair.step()
    pair.open.set()
    for version in range(1, 9):
        assert await caught_up(follower) == version
        assert bits(pair.newcomer) == bits(pair.source)
        assert pair.newcomer.version == version
        if version < 8:
            await pair.step()
    assert pair.sent == [("state", 0), *(("redo", step) for step in range(8))]


async def test_who_does_not_keep_up_gets_one_more_snapshot_and_then_nothing(pair: Pair) -> None:
    pair.open.clear()
    follower = pair.followers.follow(NEWCOMER, 1)
    await asyncio.sleep(0)
    for _ in range(QUEUED_REDOS + 1):
        await pair.step()
    assert not follower.slow
    pair.open.set()
    assert await caught_up(follower) == QUEUED_REDOS + 1
    assert [direction for direction, _ in pair.sent] == ["state", "state"]
    assert bits(pair.newcomer) == bits(pair.source)
    pair.open.clear()
    for _ in range(QUEUED_REDOS + 2):
        await pair.step()
    assert follower.slow
    assert await caught_up(follower) == -1
    sent = len(pair.sent)
    pair.open.set()
    await asyncio.wait([follower._task], timeout=PATIENCE_S)
    assert len(pair.sent) == sent + 1, "what was on its way"
    assert not pair.followers


async def test_it_is_told_how_far_a_long_transfer_is(pair: Pair) -> None:
    pair.open.clear()
    follower = pair.followers.follow(NEWCOMER, 1)
    assert await follower.caught_up(0.01) == -1
    pair.open.set()
    assert await caught_up(follower) == 0


async def test_a_newcomer_that_declines_or_is_fenced_follows_no_more(pair: Pair) -> None:
    pair.outcome = "stale"
    with pytest.raises(Conflict, match="takes no state"):
        await caught_up(pair.followers.follow(NEWCOMER, 1))
    pair.outcome = "delivered"
    follower = pair.followers.follow(NEWCOMER, 2)
    assert await caught_up(follower) == 0
    pair.followers.end([OTHER, NEWCOMER], "it is fenced")
    with pytest.raises(Conflict, match="it is fenced"):
        await caught_up(follower)
    await pair.step()
    assert pair.sent == [("state", 0), ("state", 0)]


async def test_a_newcomer_that_cannot_be_reached_is_told_of_and_hurts_nobody(pair: Pair) -> None:
    async def unreachable(*_: object) -> Outcome:
        raise PeerUnreachable("gone")

    pair.followers = Followers(unreachable, pair.snapshot)
    with pytest.raises(PeerUnreachable):
        await caught_up(pair.followers.follow(NEWCOMER, 1))
    await pair.step()


async def test_a_later_transfer_takes_the_place_of_an_earlier_one(pair: Pair) -> None:
    first = pair.followers.follow(NEWCOMER, 1)
    assert pair.followers.follow(NEWCOMER, 1) is first
    second = pair.followers.follow(NEWCOMER, 2)
    assert await caught_up(second) == 0
    with pytest.raises(Conflict, match="another transfer"):
        await caught_up(first)
    with pytest.raises(Conflict, match="overtaken"):
        pair.followers.follow(NEWCOMER, 1)


async def test_a_snapshot_that_fails_ends_the_newcomer_and_not_the_stage(pair: Pair) -> None:
    async def broken() -> tuple[int, list[Tensor]]:
        raise MemoryError

    pair.followers = Followers(pair.send, broken)
    with pytest.raises(Exception, match="could not be sent"):
        await caught_up(pair.followers.follow(NEWCOMER, 1))


# --- what a newcomer takes --------------------------------------------------------------------------------
def notice(direction: str, transfer: int, *, stage: int = 0) -> MicrobatchNotice:
    return steps.notice(SOURCE, NEWCOMER, direction=direction, step=7, stage=stage, transfer=transfer)


def test_a_newcomer_takes_the_redos_of_the_state_that_it_took_last() -> None:
    machine = StageMachine(NEWCOMER, epoch=1, stage=0, last=False, binder=Binder("a"))
    assert machine.offered(notice("redo", 2)) == "later", "its state is just arriving"
    assert machine.offered(notice("state", 2)) == "accepted"
    assert machine.takes(notice("state", 2))
    assert machine.offered(notice("redo", 2)) == "accepted"
    assert machine.offered(notice("state", 1)) == machine.offered(notice("redo", 1)) == "stale"
    assert machine.offered(notice("copy", 3)) == "stale"
    assert not machine.takes(notice("redo", 1))
    assert machine.takes(notice("state", 3))
    assert not machine.takes(notice("redo", 2)), "it was accepted, and then overtaken"


def test_a_member_takes_no_state_whatever_becomes_of_its_group() -> None:
    machine = StageMachine(NEWCOMER, epoch=1, stage=0, last=False, binder=Binder("a"))
    assert machine.takes(notice("state", 1))
    machine.admitted(7, (1, 0, 0))
    for direction in ("state", "redo"):
        assert machine.offered(notice(direction, 1)) == "stale"
        assert not machine.takes(notice(direction, 1))
    assert machine.offered(notice("redo", 0, stage=1)) == "accepted", "another stage's, to be kept"


async def test_host_tensors_are_not_copied() -> None:
    compute: StageCompute = stage()
    mean = gradients(compute, 0)
    assert await HostCopy(mean).there() is mean
