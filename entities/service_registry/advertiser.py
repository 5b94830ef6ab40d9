"""Sender of Type 2, the registry's advertisements (draft §4.3): deltas at once, the full state periodically.

A single change is sent at once; changes within `coalesce_s` after it are sent together. Each delta names the
revision that it builds on. The full state of a small mesh is one message; that of a large mesh is sent in
pieces over the period, so that neither sender nor receivers are busy with all of it at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.wire.packed import Packed, assemble
from entities.service_registry.core import RegistryCore
from schemas.errors import DmscError
from schemas.signals import RouteAdvertisement

log = get_logger("service-registry")


CHUNK_BYTES = 256 << 10
"""Most bytes of records per advertisement: far below any server's largest message."""


@dataclass(frozen=True, kw_only=True)
class AdvertiseConfig:
    """How changes and the full state are advertised."""

    coalesce_s: float = 0.01  # changes this close share one Type 2; longer saves messages, delays routes
    full_every_s: float = 10.0  # the periodic full state of draft §4.3; repairs views that missed a delta
    chunk_records: int = 256  # records per advertisement: what a reader decodes in one go

    def __post_init__(self) -> None:
        if not self.coalesce_s < self.full_every_s:
            raise ValueError(f"coalesce_s {self.coalesce_s} must be below full_every_s {self.full_every_s}")


class RegistryAdvertiser:
    """Advertises written changes: `revision` counts writes, `advertised` is the last revision sent."""

    def __init__(
        self,
        bus: Bus,
        core: RegistryCore,
        config: AdvertiseConfig,
        confirmed: Callable[[], Awaitable[None]],
        revision: int,
    ) -> None:
        self.revision = revision
        self.advertised = revision
        self._bus = bus
        self._core = core
        self._config = config
        self._confirmed = confirmed
        self._pending: set[str] = set()
        self._changed = asyncio.Event()
        self._full_due = asyncio.Event()
        self._send_lock = asyncio.Lock()  # sends one at a time: deltas must go out in order

    def written(self, sids: Collection[str]) -> None:
        """Note that the bucket has these records now; they are due for a delta."""
        self.revision += len(sids)
        self._pending.update(sids)
        self._changed.set()

    def full_soon(self) -> None:
        """Have the full state sent soon, because receivers may have missed changes."""
        self._full_due.set()

    async def deltas(self) -> None:
        """Advertise changes until cancelled."""
        while True:
            await self._changed.wait()
            await self.flush()
            await asyncio.sleep(self._config.coalesce_s)

    async def flush(self) -> None:
        """Advertise all written changes now."""
        async with self._send_lock:
            self._changed.clear()
            if not self._pending:
                return
            await self._confirmed()
            sids, self._pending = sorted(self._pending), set()
            previous, self.advertised = self.advertised, self.revision
            for chunk in self._chunks(sids):
                await self._send(previous, chunk)
                previous = self.advertised  # further chunks of the same revision build on the first

    async def full(self) -> None:
        """Advertise the full state at start, on request and periodically, until cancelled."""
        while True:
            start = time.monotonic()
            self._full_due.clear()
            await self._send_full()
            try:
                async with asyncio.timeout(max(0.0, start + self._config.full_every_s - time.monotonic())):
                    await self._full_due.wait()
            except TimeoutError:
                pass

    async def _send_full(self) -> None:
        chunks = list(self._chunks(self._core.sids()))
        if len(chunks) <= 1:
            await self.flush()
            async with self._send_lock:
                await self._confirmed()
                await self._send(self.advertised, self._core.sids(), full=True)
            return
        # In pieces that add and never remove: a receiver at another revision asks for a snapshot.
        pause_s = self._config.full_every_s / (len(chunks) + 1)
        for chunk in chunks:
            await self.flush()
            async with self._send_lock:
                await self._confirmed()
                present = [sid for sid in chunk if self._core.packed(sid) is not None]
                await self._send(self.advertised, present)
            await asyncio.sleep(pause_s)

    def _chunks(self, sids: Collection[str]) -> Iterator[list[str]]:
        """Split `sids` into lists whose records fit into one advertisement each."""
        chunk: list[str] = []
        size = 0
        for sid in sids:
            packed = self._core.packed(sid)
            bytes_ = len(sid) if packed is None else len(packed.body)
            if chunk and (len(chunk) == self._config.chunk_records or size + bytes_ > CHUNK_BYTES):
                yield chunk
                chunk, size = [], 0
            chunk.append(sid)
            size += bytes_
        if chunk:
            yield chunk

    async def _send(self, previous: int, sids: Collection[str], *, full: bool = False) -> None:
        changed: list[Packed[Any]] = []
        removed: list[str] = []
        for sid in sids:
            record = self._core.packed(sid)
            if record is None:
                removed.append(sid)
            else:
                changed.append(record)
        message = assemble(
            RouteAdvertisement,
            {"revision": self.advertised, "previous": previous, "full": full, "removed": removed},
            {"changed": changed},
        )
        try:
            await self._bus.publish(subjects.ADVERTISEMENT, message)
        except DmscError as error:
            # Receivers see the gap in the next revision, and the reconnect sends the full state.
            log.warning("advertisement not sent", revision=self.advertised, error=error.text)
