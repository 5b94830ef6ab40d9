"""Hops between instances (DESIGN §5 rule 11, §6): every tensor arrives bit for bit, once, or there is one
clear error soon; no fault leaves anybody hanging, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bus.connection import Bus
from bus.messaging import rendezvous
from bus.server.embedded import EmbeddedServer
from bus.subjects import NOTICE, NOTICE_ANSWER
from schemas.envelope import EntityKind
from schemas.errors import BadInput, PeerUnreachable
from schemas.step import Member
from tests.conftest import Connect
from tests.integration.workers.exchanging import Instance, Make, numbered, own_connections
from tests.patience import PATIENCE_S
from workers.links.reduction import ReductionGroup
from workers.transport import gloo, link_authentication, reachability
from workers.transport.gloo import GroupConfig


class Interceptor:
    """Stands before a bus's `publish` and may swallow what a test names. Counts what it swallowed."""

    def __init__(
        self, bus: Bus, monkeypatch: pytest.MonkeyPatch, swallow: Callable[[Any, Any], bool]
    ) -> None:
        self.swallowed: list[Any] = []
        self.swallowing = asyncio.Event()
        publish = bus.publish

        async def intercepted(row: Any, message: Any, **options: Any) -> str:
            if swallow(row, message):
                self.swallowed.append(message)
                self.swallowing.set()
                return "swallowed"
            return await publish(row, message, **options)

        monkeypatch.setattr(bus, "publish", intercepted)


def same_bits(sent: Tensor, received: Tensor) -> bool:
    if sent.shape != received.shape or sent.dtype != received.dtype:
        return False
    if not sent.numel():
        return True
    return torch.equal(
        sent.contiguous().reshape(-1).view(torch.uint8), received.reshape(-1).view(torch.uint8)
    )


# --- what arrives -------------------------------------------------------------------------------------------
def every_kind() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(0, 256, (4, 6, 16), dtype=torch.uint8, generator=generator)
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    ):
        yield raw.view(dtype)  # any bits, NaNs with payloads among them
    yield raw > 127
    yield torch.tensor(3.25)
    yield torch.tensor(9, dtype=torch.int64)
    yield torch.empty(0, 5, dtype=torch.bfloat16)
    yield torch.arange(24.0).reshape(4, 6).t()  # not contiguous
    yield torch.ones(3, requires_grad=True)


async def test_any_dtype_and_shape_arrives_bit_for_bit(make: Make) -> None:
    one, two = await make("one"), await make("two")
    tensors = list(every_kind())
    assert await one.send(two, 0, *tensors) == "delivered"
    notice, received = await two.arrival()
    assert len(received) == len(tensors)
    assert all(same_bits(sent.detach(), got) for sent, got in zip(tensors, received, strict=True))
    assert notice.sender == one.member
    assert (notice.epoch, notice.step, notice.direction) == (3, 5, "forward")
    assert [meta.dtype for meta in notice.tensors][:2] == ["float64", "float32"]


async def test_a_hop_without_tensors_is_a_hop(make: Make) -> None:
    one, two = await make("one"), await make("two")
    assert await one.send(two, 0, direction="backward", evaluate=True) == "delivered"
    notice, received = await two.arrival()
    assert list(received) == []
    assert notice.evaluate


async def test_two_hundred_hops_in_both_directions_at_once_use_one_link(make: Make) -> None:
    one, two = await make("one"), await make("two")

    async def stream(source: Instance, target: Instance, direction: str) -> None:
        hops = (
            source.send(target, number, numbered(number), torch.tensor([number]), direction=direction)
            for number in range(100)
        )
        assert set(await asyncio.gather(*hops)) == {"delivered"}

    await asyncio.gather(stream(one, two, "forward"), stream(two, one, "backward"))
    for instance in (one, two):
        seen = set()
        for _ in range(100):
            notice, (body, target) = await instance.arrival()
            assert torch.equal(body, numbered(notice.microbatch))
            assert int(target) == notice.microbatch
            seen.add(notice.microbatch)
        assert seen == set(range(100))
        assert instance.inbox.empty()
        assert {notice.link for notice in instance.asked} == {"one.1+two.1+1"}
    sample = one.exchange.samples()[0]
    assert (sample.peer, sample.transfers, sample.errors) == ("two", 100, 0)
    assert sample.sent_bytes == sample.received_bytes == 100 * (64 * 4 + 8)
    assert sample.transfer_ms > 0
    assert one.exchange.samples()[0].transfers == 0


async def test_state_of_many_tensors(make: Make) -> None:
    one, two = await make("one"), await make("two")
    state = [torch.randn(random.randrange(1, 2000)) for _ in range(300)]
    assert await one.send(two, 0, *state, direction="state") == "delivered"
    _, received = await two.arrival()
    assert all(same_bits(sent, got) for sent, got in zip(state, received, strict=True))


# --- the bus loses, repeats and reorders --------------------------------------------------------------------
async def test_a_lost_notice_is_repeated_and_holds_up_nobody(
    make: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect("sender", EntityKind.INSTANCE)
    one, two = await make("one", bus=bus), await make("two")
    assert await one.send(two, 99, numbered(99)) == "delivered"
    await two.arrival()
    lost: list[int] = []

    def first_of_microbatch_0(row: Any, message: Any) -> bool:
        swallow = row is NOTICE and message.microbatch == 0 and not lost
        lost.extend([0] if swallow else [])
        return swallow

    interceptor = Interceptor(bus, monkeypatch, first_of_microbatch_0)
    sends = asyncio.gather(*(one.send(two, number, numbered(number)) for number in range(4)))
    order = [(await two.arrival())[0].microbatch for _ in range(4)]
    assert set(await sends) == {"delivered"}
    assert len(interceptor.swallowed) == 1
    assert set(order) == {0, 1, 2, 3}
    assert order[-1] == 0  # the others did not wait for it


async def test_lost_answers_do_not_matter(
    make: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect("receiver", EntityKind.INSTANCE)
    one, two = await make("one"), await make("two", bus=bus)
    interceptor = Interceptor(bus, monkeypatch, lambda row, message: row is NOTICE_ANSWER)
    assert await one.send(two, 0, numbered(0)) == "delivered"
    assert interceptor.swallowed
    await two.arrival()
    assert two.inbox.empty()


async def test_duplicate_and_reordered_notices(
    make: Make, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus, raw = await connect("sender", EntityKind.INSTANCE), await connect("bare", EntityKind.INSTANCE)
    one, two = await make("one", bus=bus), await make("two")
    interceptor = Interceptor(bus, monkeypatch, lambda row, message: row is NOTICE)
    sends = [asyncio.create_task(one.send(two, number, numbered(number))) for number in range(5)]
    while len({notice.microbatch for notice in interceptor.swallowed}) < 5:
        interceptor.swallowing.clear()
        await interceptor.swallowing.wait()
    notices = {notice.microbatch: notice for notice in interceptor.swallowed}
    for number in (3, 1, 4, 0, 2, 3, 3, 0):  # by another hand, in another order, some of them twice
        await raw.publish(NOTICE, notices[number], job=Instance.job, sid="two")
    arrived = [(await two.arrival()) for _ in range(5)]
    assert [notice.microbatch for notice, _ in arrived] == [3, 1, 4, 0, 2]
    assert all(torch.equal(tensors[0], numbered(notice.microbatch)) for notice, tensors in arrived)
    assert set(await asyncio.gather(*sends)) == {"delivered"}
    for notice in notices.values():  # and once more when all is over
        await raw.publish(NOTICE, notice, job=Instance.job, sid="two")
    assert await two.send(one, 0) == "delivered"
    assert len(two.asked) == 5
    assert two.inbox.empty()


async def test_an_offer_made_while_the_bus_is_away_arrives_when_it_is_back(
    own_server: EmbeddedServer,
) -> None:
    async with own_connections(own_server.url) as (one, two):
        await one.send(two, 0, numbered(0))
        await two.arrival()
        await own_server.stop()
        sending = asyncio.create_task(one.send(two, 1, numbered(1)))
        done, _ = await asyncio.wait({sending}, timeout=0.3)
        assert not done
        await own_server.start()
        assert await asyncio.wait_for(sending, PATIENCE_S) == "delivered"
        assert torch.equal((await two.arrival())[1][0], numbered(1))


async def test_a_first_offer_made_while_the_bus_is_away_builds_its_link_when_it_is_back(
    own_server: EmbeddedServer,
) -> None:
    """Without the bus no link is built; that is nobody's fault and no reason to give up on a peer."""
    async with own_connections(own_server.url) as (one, two):
        await own_server.stop()
        sending = asyncio.create_task(one.send(two, 1, numbered(1)))
        done, _ = await asyncio.wait({sending}, timeout=0.5)
        assert not done
        await own_server.start()
        assert await asyncio.wait_for(sending, PATIENCE_S) == "delivered"
        assert torch.equal((await two.arrival())[1][0], numbered(1))
        assert one.broken.empty()


# --- answers ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("answer", ["held", "stale"])
async def test_declined_offers_leave_the_link_clean(make: Make, answer: str) -> None:
    one, two = await make("one"), await make("two")
    two.answer = answer
    for number in range(3):
        assert await one.send(two, number, torch.randn(100_000)) == answer
    two.answer = "accepted"
    assert await one.send(two, 3, numbered(3)) == "delivered"
    assert (await two.arrival())[0].microbatch == 3
    assert {notice.link for notice in two.asked} == {"one.1+two.1+1"}


async def test_an_offer_put_off_arrives_when_reconsidered(make: Make) -> None:
    one, two = await make("one"), await make("two")
    two.answer = "later"
    sending = asyncio.create_task(one.send(two, 0, numbered(0)))
    await two.was_asked(1)
    done, _ = await asyncio.wait({sending}, timeout=0.1)
    assert not done
    two.answer = "accepted"
    two.exchange.reconsider()
    assert await asyncio.wait_for(sending, PATIENCE_S) == "delivered"
    await two.arrival()


async def test_notices_for_another_incarnation_are_not_taken(make: Make) -> None:
    one, two = await make("one"), await make("two", "new")
    old = Member(sid="two", incarnation="old")
    sending = asyncio.create_task(one.send(old, 0, numbered(0)))
    done, _ = await asyncio.wait({sending}, timeout=0.3)
    assert not done
    assert two.asked == []
    one.exchange.fence(old)
    with pytest.raises(PeerUnreachable, match="fenced"):
        await sending


# --- links come and go --------------------------------------------------------------------------------------
async def test_both_sides_opening_at_once_open_the_same_link(make: Make) -> None:
    for number in range(5):
        one, two = await make(f"one-{number}"), await make(f"two-{number}")
        await asyncio.gather(one.send(two, 0, numbered(0)), two.send(one, 0, numbered(0)))
        names = {notice.link for notice in (*one.asked, *two.asked)}
        assert len(names) == 1
        assert names.pop().endswith("+1")


async def test_least_recently_used_links_are_dropped_and_opened_again(make: Make, held: Any) -> None:
    hub = await make("hub", most=2)
    peers = [await make(f"peer-{number}") for number in range(4)]
    for peer in peers:
        await hub.send(peer, 0, numbered(0))
        await peer.arrival()
    assert len(hub.exchange._table) == 2
    assert hub.broken.empty()
    await hub.send(peers[3], 1, numbered(1))  # still there
    assert peers[3].asked[-1].link.endswith("+1")
    await hub.send(peers[0], 1, numbered(1))  # dropped: the pair's next one
    assert peers[0].asked[-1].link.endswith("+2")
    await peers[1].send(hub, 2, numbered(2))  # from the other side
    assert hub.asked[-1].link.endswith("+2")
    assert torch.equal((await hub.arrival())[1][0], numbered(2))
    assert len(hub.exchange._table) == 2
    for peer in peers:
        assert peer.broken.empty()  # a goodbye is no fault


async def test_close_leaves_no_thread_and_no_socket(connect: Connect, held: Any) -> None:
    bus = await connect("instances", EntityKind.INSTANCE)
    before = held()
    instances = [Instance(bus, f"i{number}") for number in range(4)]
    for instance in instances:
        await instance.exchange.__aenter__()
    hops = [
        source.send(target, 0, numbered(0))
        for source in instances
        for target in instances
        if source != target
    ]
    assert set(await asyncio.gather(*hops)) == {"delivered"}
    assert before.now()[0] > before.before[0]
    instances[1].answer = "later"
    open_send = asyncio.create_task(instances[0].send(instances[1], 1, torch.ones(1 << 20)))
    await asyncio.sleep(0)
    for instance in instances:
        await instance.exchange.close()
        await instance.exchange.close()
    with pytest.raises(PeerUnreachable):
        await open_send
    with pytest.raises(PeerUnreachable, match="closed"):
        await instances[0].send(instances[1], 2)
    del instances, instance, hops, open_send
    await before.nothing_more()


async def test_withdrawn_offers_go_and_the_next_ones_arrive(make: Make) -> None:
    one, two = await make("one", withdrawn_s=0.3), await make("two", withdrawn_s=0.3)
    two.answer = "later"
    cancelled = asyncio.create_task(one.send(two, 0, numbered(0)))
    withdrawn = asyncio.create_task(one.send(two, 1, numbered(1)))
    await two.was_asked(2)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    one.exchange.cancel_sends()
    assert await asyncio.wait_for(withdrawn, PATIENCE_S) == "withdrawn"
    two.answer = "accepted"
    assert await one.send(two, 2, numbered(2)) == "delivered"
    assert (await two.arrival())[0].microbatch == 2
    assert two.inbox.empty()


# --- addresses ----------------------------------------------------------------------------------------------
async def test_the_listening_port_falls_into_the_range_asked_for(make: Make) -> None:
    low = int(gloo.PORT_RANGE.read_text().split()[0]) + 1000
    before = reachability.listening()
    one, two = await make("one", ports=(low, low + 2000)), await make("two", ports=(low, low + 2000))
    assert await one.send(two, 0, numbered(0)) == "delivered"
    opened = reachability.listening() - before
    assert len(opened) == 1  # one for all links of the process
    assert low <= opened.pop() <= low + 2000


async def test_an_address_that_is_not_ours_is_one_clear_line() -> None:
    with pytest.raises(
        BadInput, match=r"cannot listen on '192\.0\.2\.1': it is not an address of this machine"
    ):
        await gloo.in_thread("test", lambda: gloo.open_device("192.0.2.1"))
    with pytest.raises(BadInput, match="no port between 1 and 2"):
        await gloo.in_thread("test", lambda: gloo.open_device("127.0.0.1", (1, 2)))


# --- who is at the other end --------------------------------------------------------------------------------
SECRET, OTHER = b"s" * 32, b"o" * 32


async def test_members_of_a_job_know_each_other_and_a_stranger_is_refused_and_counted(make: Make) -> None:
    one, two = await make("one", secret=SECRET), await make("two", secret=SECRET)
    assert await one.send(two, 0, numbered(0)) == "delivered"
    stranger = await make("stranger", secret=OTHER, build_timeout_s=1.0)
    with pytest.raises(PeerUnreachable, match="cannot be reached"):
        await stranger.send(two, 1, numbered(1))
    refused = sum(
        sample.refused for each in (two, stranger) for sample in each.exchange.samples()
    )  # whichever of them looked first
    assert refused >= 1
    assert two.inbox.qsize() == 1
    assert await two.send(one, 2, numbered(2)) == "delivered", "the others go on"


async def test_whoever_passes_the_rendezvous_has_to_prove_it_on_the_link_too(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As somebody does who connects to a listening port, knowing or guessing what gloo expects there."""
    monkeypatch.setattr(rendezvous.Rendezvous, "_verified", lambda self, key, data: data[32:])
    two = await make("two", secret=SECRET, build_timeout_s=5.0)
    stranger = await make("stranger", secret=OTHER, build_timeout_s=5.0)
    with pytest.raises(PeerUnreachable, match="prove"):
        await stranger.send(two, 1, numbered(1))
    refused = {sample.peer: sample.refused for sample in two.exchange.samples()}
    assert refused.get("stranger", 0) + sum(s.refused for s in stranger.exchange.samples()) >= 1
    assert two.inbox.empty()


async def test_a_reduction_group_takes_no_stranger(connect: Connect) -> None:
    members = [Member(sid=f"r{rank}", incarnation="1") for rank in range(3)]

    async def build(rank: int, secret: bytes) -> ReductionGroup:
        bus = await connect(f"r{rank}", EntityKind.INSTANCE)
        return await ReductionGroup.build(
            bus,
            job="job",
            stage=0,
            generation=1,
            members=members,
            me=members[rank],
            config=GroupConfig(secret=secret, build_timeout_s=2.0),
        )

    groups = await asyncio.gather(*(build(rank, SECRET) for rank in range(3)))
    sums = await asyncio.gather(*(group.all_reduce(torch.ones(2)) for group in groups))
    assert all(torch.equal(found, torch.full((2,), 3.0)) for found in sums)
    for group in groups:
        group.release()
        await group.released_fully()
    members = [Member(sid=f"r{rank}", incarnation="2") for rank in range(3)]
    failed = await asyncio.gather(
        *(build(rank, SECRET if rank else OTHER) for rank in range(3)), return_exceptions=True
    )
    assert all(isinstance(error, PeerUnreachable) for error in failed), failed


def test_a_proof_fits_one_challenge_one_group_and_one_rank() -> None:
    good = link_authentication.proof(SECRET, "g", 0, b"n" * 32, b"c" * 32)
    assert good == link_authentication.proof(SECRET, "g", 0, b"n" * 32, b"c" * 32)
    others = [
        link_authentication.proof(OTHER, "g", 0, b"n" * 32, b"c" * 32),
        link_authentication.proof(SECRET, "h", 0, b"n" * 32, b"c" * 32),
        link_authentication.proof(SECRET, "g", 1, b"n" * 32, b"c" * 32),
        link_authentication.proof(SECRET, "g", 0, b"m" * 32, b"c" * 32),
        link_authentication.proof(SECRET, "g", 0, b"n" * 32, b"d" * 32),
    ]
    assert good not in others
    assert len(set(others)) == 5
