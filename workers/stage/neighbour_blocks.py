"""Blocks of the node's cache for the job's data instances on other nodes, and theirs for this one (ADR-0048).

Who keeps what is told on the bus; a block itself goes over a tensor link, by which members of a job know each
other. Nothing here is waited for unless a neighbour has said that it keeps the block, and every failure
means the store.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import CancelledError, TimeoutError
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from bus.subjects import BLOCK_SEND, BLOCKS_KEPT
from bus.tasks import TaskSet
from schemas.data_blocks import MOST_KEYS, BlockSend, BlocksKept
from schemas.data_plane import MicrobatchNotice
from schemas.envelope import Envelope
from schemas.errors import Ack, DmscError, NoResponders, NotFound, Unavailable
from schemas.step import Member
from workers.data.storage.block_cache import BlockCache
from workers.data.storage.block_file import file_bytes
from workers.links.hop_exchange import Outcome
from workers.links.offers import TensorTransfer

log = get_logger("data")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourConfig:
    """How much is asked of other nodes, and for how long."""

    wait_s: float = 5.0
    """For one block, a link that has to be built included. Then the store is asked."""
    away_s: float = 60.0
    """So long nobody is asked who has failed."""
    tell_s: float = 1.0
    """How often new blocks are told of."""
    most_known: int = 1 << 18
    """Blocks of others that are remembered: 1 TiB of 4 MiB; those told of last."""
    most_sending: int = 4
    """Blocks that are sent at a time: each lies in memory. Whoever asks for more goes to the store."""


@dataclass(slots=True)
class _Request:
    holder: str
    file_bytes: int
    arrived: asyncio.Future[bytes]


class NeighbourBlocks:
    """A data instance's line to the other nodes of its job. Made and closed on the event loop.

    Args:
        bus: A connected bus.
        job: Whose instance this is.
        member: This instance.
        node: Its node agent, whose instances share a cache.
        cache: That cache.
        send: Sends a transfer over a tensor link.
        config: Times and bounds.
    """

    def __init__(
        self,
        bus: Bus,
        *,
        job: str,
        member: Member,
        node: str,
        cache: BlockCache,
        send: Callable[[TensorTransfer], Awaitable[Outcome]],
        config: NeighbourConfig = NeighbourConfig(),
    ) -> None:
        self._bus, self._job, self._member, self._node = bus, job, member, node
        self._cache, self._send, self._config = cache, send, config
        self._loop = asyncio.get_running_loop()
        self._known: OrderedDict[str, str] = OrderedDict()
        self._away: dict[str, float] = {}
        self._refused: set[str] = set()
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count(1)
        self._fresh: list[str] = []
        self._sending = 0
        self._tasks = TaskSet()
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        """Tells what lies here, and asks the others to do the same."""
        self._subscriptions = [
            await self._bus.subscribe(BLOCKS_KEPT, self._heard, job=self._job),
            await self._bus.serve(BLOCK_SEND, self._asked_for, job=self._job, sid=self._member.sid),
        ]
        await self._tell_all(asks=True)
        self._tasks.create(self._telling())

    async def close(self) -> None:
        """Asks and answers nothing more. Idempotent."""
        for subscription in self._subscriptions:
            await subscription.stop(drain=False)
        self._subscriptions = []
        for request in self._requests.values():
            request.arrived.cancel()
        await self._tasks.close()

    # --- asking: on any thread ------------------------------------------------------------------------------
    def ask(self, key: str, block_length: int) -> bytes | None:
        """See `NeighbourLine`. Blocks for at most `wait_s`."""
        holder = self._known.get(key)
        if holder is None or holder in self._refused or time.monotonic() < self._away.get(holder, 0.0):
            return None
        asked = asyncio.run_coroutine_threadsafe(self._request(holder, key, block_length), self._loop)
        try:
            return asked.result(self._config.wait_s)
        except (NotFound, NoResponders):
            self._known.pop(key, None)
        except (DmscError, TimeoutError, CancelledError) as error:
            asked.cancel()
            if type(error) is Unavailable:  # it sends enough at present
                return None
            self._away[holder] = time.monotonic() + self._config.away_s
            log.info("a block did not come from another node", holder=holder, why=str(error) or "in vain")
        return None

    def refuse(self, key: str) -> None:
        """See `NeighbourLine`."""
        if (holder := self._known.get(key)) is not None:
            self._refused.add(holder)

    def kept(self, key: str) -> None:
        """See `NeighbourLine`."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._fresh.append, key)

    # --- on the loop ----------------------------------------------------------------------------------------
    async def _request(self, holder: str, key: str, block_length: int) -> bytes:
        number = next(self._numbers)
        request = _Request(holder, file_bytes(block_length), self._loop.create_future())
        self._requests[number] = request
        order = BlockSend(job=self._job, key=key, bytes=block_length, to=self._member, transfer=number)
        try:
            await self._bus.request(
                BLOCK_SEND, order, timeout_s=self._config.wait_s, job=self._job, sid=holder
            )
            return await request.arrived
        finally:
            del self._requests[number]

    def offered(self, notice: MicrobatchNotice) -> str:
        """The answer to an offer of a block: what was not asked for, of this size, is not taken."""
        request = self._requests.get(notice.transfer)
        if request is None or notice.receiver != self._member or notice.sender.sid != request.holder:
            return "stale"
        shapes = [(tensor.dtype, tensor.shape) for tensor in notice.tensors]
        return "accepted" if shapes == [("uint8", (request.file_bytes,))] else "stale"

    def received(self, notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        """Takes a block that `offered` has accepted."""
        request = self._requests.get(notice.transfer)
        if request is not None and not request.arrived.done():
            request.arrived.set_result(tensors[0].numpy().tobytes())

    async def _heard(self, message: BlocksKept, _: Envelope) -> None:
        if message.member.sid == self._member.sid:
            return
        if message.asks:
            self._away.pop(message.member.sid, None)
        if message.node != self._node:
            for key in message.keys:
                self._known[key] = message.member.sid
                self._known.move_to_end(key)
            while len(self._known) > self._config.most_known:
                self._known.popitem(last=False)
        if message.asks and message.node != self._node:
            self._tasks.create(self._tell_all())

    async def _asked_for(self, order: BlockSend, _: Envelope) -> Ack:
        if self._sending >= self._config.most_sending:
            raise Unavailable("too many blocks are being sent; the store has it, too")
        self._sending += 1
        try:
            content = await asyncio.to_thread(self._cache.file_of, order.key, order.bytes)
        except BaseException:
            self._sending -= 1
            raise
        if content is None:
            self._sending -= 1
            raise NotFound(f"block {order.key} is not kept here any more")
        self._tasks.create(self._deliver(order, content))
        return Ack()

    async def _deliver(self, order: BlockSend, content: bytes) -> None:
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        transfer = TensorTransfer(
            direction="block",
            receiver=order.to,
            stage=-1,
            step=0,
            transfer=order.transfer,
            tensors=[tensor],
        )
        try:
            with suppress(DmscError):  # whoever asked goes to the store
                await self._send(transfer)
        finally:
            self._sending -= 1

    # --- telling --------------------------------------------------------------------------------------------
    async def _telling(self) -> None:
        while True:
            await asyncio.sleep(self._config.tell_s)
            if self._fresh:
                fresh, self._fresh = self._fresh, []
                await self._tell(fresh)

    async def _tell_all(self, *, asks: bool = False) -> None:
        keys = await asyncio.to_thread(self._cache.keys)
        await self._tell(keys, asks=asks)

    async def _tell(self, keys: Iterable[str], *, asks: bool = False) -> None:
        for part in _parts(keys) or [()]:
            message = BlocksKept(job=self._job, member=self._member, node=self._node, keys=part, asks=asks)
            with suppress(DmscError):  # whoever is not told goes to the store
                await self._bus.publish(BLOCKS_KEPT, message, job=self._job, sid=self._member.sid)
            asks = False


def _parts(keys: Iterable[str]) -> list[tuple[str, ...]]:
    left = list(keys)
    return [tuple(left[start : start + MOST_KEYS]) for start in range(0, len(left), MOST_KEYS)]
