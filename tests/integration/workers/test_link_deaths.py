"""Peers that die or stop in mid-transfer (DESIGN §5 rule 11): an error soon, and nothing stays behind."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
import torch

from bus.server.embedded import EmbeddedServer
from schemas.errors import PeerUnreachable
from schemas.step import Member
from tests.integration.workers.conftest import Child, Spawn
from tests.integration.workers.exchanging import Instance, Make, numbered
from tests.patience import PATIENCE_S

Linked = Callable[..., Awaitable[tuple[Child, Member]]]


@pytest.fixture
def linked(server: EmbeddedServer, spawn: Spawn) -> Linked:
    """`child, peer = await linked(one)`: a process that takes what comes, and a link to it that stands.

    With a signal's name it strikes itself with it in the middle of the next transfer.
    """

    async def start(one: Instance, *struck_by: str) -> tuple[Child, Member]:
        child = await spawn("link_peer.py", server.url, Instance.job, "two", "1", "take", *struck_by)
        await child.event("ready")
        peer = Member(sid="two", incarnation="1")
        await one.send(peer, 0, numbered(0))
        await child.event("received")
        return child, peer

    return start


async def test_the_receiver_is_killed_in_the_middle_of_a_big_transfer(
    make: Make, server: EmbeddedServer, spawn: Spawn, linked: Linked, held: Any
) -> None:
    """The error comes at once, the new incarnation takes the same hop again, and nothing stays behind."""
    one = await make("one", build_timeout_s=2.0)
    before = held()
    child, old = await linked(one, "SIGKILL")
    big = torch.arange(64 << 20, dtype=torch.float32)  # 256 MB: some 200 ms on loopback
    new = Member(sid="two", incarnation="2")
    sending = asyncio.create_task(one.send(old, 0, big))
    await child.event("decide")
    assert await child.ended() == -signal.SIGKILL
    assert await asyncio.wait_for(one.broken.get(), PATIENCE_S) == old  # not only after the transfer's time
    one.exchange.fence(old)
    with pytest.raises(PeerUnreachable):
        await asyncio.wait_for(sending, PATIENCE_S)
    second = await spawn("link_peer.py", server.url, Instance.job, "two", "2", "take")
    await second.event("ready")
    assert await asyncio.wait_for(one.send(new, 0, big, attempt=1), PATIENCE_S) == "delivered"
    said = await second.event("received")
    assert said["digest"] == hashlib.blake2b(big.numpy().tobytes()).hexdigest()
    one.exchange.fence(new)
    await second.kill()
    await child.kill()
    del sending
    await before.nothing_more()


async def test_a_dead_receiver_is_unreachable_after_a_few_links(make: Make, linked: Linked) -> None:
    """Nobody fences: the sender gives up by itself, in one line that names the peer."""
    one = await make("one", build_timeout_s=1.0)
    child, peer = await linked(one)
    await child.kill()
    with pytest.raises(PeerUnreachable, match=r"two \(1\) cannot be reached from one") as caught:
        await asyncio.wait_for(one.send(peer, 1, numbered(1)), PATIENCE_S)
    assert caught.value.fields["peer"] == "two"
    assert "\n" not in caught.value.text


async def test_the_sender_is_killed_in_the_middle_of_a_big_transfer(
    make: Make, server: EmbeddedServer, spawn: Spawn, held: Any
) -> None:
    two = await make("two")
    before = held()
    child = await spawn("link_peer.py", server.url, Instance.job, "one", "1", "offer", "two", "1", 256)
    await two.was_asked(2)
    await asyncio.sleep(0.03)
    await two.arrival()  # the small one
    assert two.inbox.empty()  # in the middle of the big one
    os.kill(child.pid, signal.SIGKILL)
    lost = await asyncio.wait_for(two.lost.get(), PATIENCE_S)
    assert lost.microbatch == 7
    assert two.inbox.empty()
    two.exchange.fence(lost.sender)
    await child.kill()
    await before.nothing_more()


async def test_a_fence_frees_what_waits_for_a_stopped_process(make: Make, linked: Linked, held: Any) -> None:
    """Stopped (`T`), not dead: no connection closes, only the fence ends it."""
    one = await make("one")
    before = held()
    child, peer = await linked(one)
    os.kill(child.pid, signal.SIGSTOP)
    try:
        sends = [asyncio.create_task(one.send(peer, number, torch.ones(8 << 20))) for number in (1, 2)]
        done, _ = await asyncio.wait(sends, timeout=0.5)
        assert not done
        one.exchange.fence(peer)
        results = await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), PATIENCE_S)
        assert all(isinstance(result, PeerUnreachable) for result in results)
    finally:
        os.kill(child.pid, signal.SIGCONT)
    await child.kill()
    del sends, results, done, _
    await before.nothing_more()


async def test_accepted_and_never_taken_is_an_error(make: Make, linked: Linked) -> None:
    """A peer that stops in the middle of an accepted transfer, and nobody who says so."""
    one = await make("one", transfer_timeout_s=2.0, build_timeout_s=1.0, slowest_bytes_per_s=1e9)
    child, peer = await linked(one, "SIGSTOP")
    try:
        with pytest.raises(PeerUnreachable, match="cannot be reached"):
            await asyncio.wait_for(one.send(peer, 1, torch.ones(64 << 20)), PATIENCE_S)
        assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED, "the fault never fired"
    finally:
        os.kill(child.pid, signal.SIGCONT)
