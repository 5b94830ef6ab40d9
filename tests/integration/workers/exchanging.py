"""Instances that exchange tensors and keep what they got, for the tests of links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bus.connection import Bus
from schemas.data_plane import MicrobatchNotice
from schemas.envelope import EntityKind
from schemas.step import Member
from tests.patience import NEVER_S, PATIENCE_S
from workers.links.hop_exchange import HopExchange
from workers.links.link_config import LinkConfig
from workers.links.offers import TensorTransfer

CONFIG = LinkConfig(build_timeout_s=PATIENCE_S, transfer_timeout_s=NEVER_S)
"""No link is given up because this machine stands still."""

Arrival = tuple[MicrobatchNotice, Sequence[Tensor]]


class Instance:
    """A member with an exchange, an inbox, and a decision that a test may change.

    `of_links`: fields of `config` that are other than there.
    """

    job = "job"

    def __init__(
        self, bus: Bus, sid: str, incarnation: str = "1", *, config: LinkConfig = CONFIG, **of_links: Any
    ) -> None:
        self.member = Member(sid=sid, incarnation=incarnation)
        self.inbox: asyncio.Queue[Arrival] = asyncio.Queue()
        self.asked: list[MicrobatchNotice] = []
        self.asking = asyncio.Event()
        self.lost: asyncio.Queue[MicrobatchNotice] = asyncio.Queue()
        self.broken: asyncio.Queue[Member] = asyncio.Queue()
        self.answer = "accepted"
        self.exchange = HopExchange(
            bus,
            member=self.member,
            job=self.job,
            epoch=3,
            decide=self.decide,
            received=lambda notice, tensors: self.inbox.put_nowait((notice, tensors)),
            lost=lambda notice, error: self.lost.put_nowait(notice),
            broken=lambda peer, error: self.broken.put_nowait(peer),
            config=replace(config, **of_links),
        )

    def decide(self, notice: MicrobatchNotice) -> str:
        self.asked.append(notice)
        self.asking.set()
        return self.answer

    async def was_asked(self, times: int) -> None:
        while len(self.asked) < times:
            self.asking.clear()
            await asyncio.wait_for(self.asking.wait(), PATIENCE_S)

    async def send(self, to: Instance | Member, microbatch: int, *tensors: Tensor, **options: Any) -> str:
        given: dict[str, Any] = {"direction": "forward", "stage": 1, "step": 5, "attempt": 0, **options}
        receiver = to.member if isinstance(to, Instance) else to
        transfer = TensorTransfer(receiver=receiver, microbatch=microbatch, tensors=tensors, **given)
        return await self.exchange.send(transfer)

    async def arrival(self) -> Arrival:
        return await asyncio.wait_for(self.inbox.get(), PATIENCE_S)


Make = Callable[..., Awaitable[Instance]]


@asynccontextmanager
async def own_connections(url: str) -> AsyncIterator[tuple[Instance, Instance]]:
    """Instances `one` and `two`, each with a connection of its own to a server that the test may stop."""
    async with (
        Bus.connect(url, name="one", kind=EntityKind.INSTANCE) as here,
        Bus.connect(url, name="two", kind=EntityKind.INSTANCE) as there,
    ):
        await here.provision()
        one, two = Instance(here, "one"), Instance(there, "two")
        async with one.exchange, two.exchange:
            yield one, two


def numbered(microbatch: int, size: int = 64) -> Tensor:
    return torch.full((size,), float(microbatch))
