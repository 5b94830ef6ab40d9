"""Files that an instance writes below the job's artifacts on the orchestrator's order.

They are a checkpoint's manifest and the list of the weights.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

from bus.connection import Bus
from bus.files.artifacts import Artifacts
from schemas.checkpoint import MANIFEST_NAME, CheckpointFile, CheckpointManifest, parse_manifest
from schemas.errors import Ack, BadInput, BadMessage, Conflict, NotFound, Unavailable
from schemas.files import PublishFile
from workers.process.url_rules import open_url

AT_ONCE = 4
"""Most files whose pieces are kept; a further one replaces the oldest."""


class Publisher:
    """Collects the pieces of files and writes each file once it is complete.

    Args:
        bus: The bus, on which artifacts may be stored.
        own: URL of the job's own part of its artifacts: nothing is written elsewhere.
        write_s: Timeout of the artifact store for one file, the check of a manifest's parts included.
    """

    def __init__(self, bus: Bus, own: str, *, write_s: float = 60.0) -> None:
        self._write_s = write_s
        self._bus = bus
        self._own = own
        self._pieces: OrderedDict[tuple[str, str, str], bytearray] = OrderedDict()
        self._lane = asyncio.Lock()

    async def take(self, order: PublishFile) -> Ack:
        """Takes a piece; answers the last one once the file is stored. Idempotent.

        Raises:
            Conflict: An earlier piece is missing; or the file is a manifest, and a file that it lists is
                missing.
            Unavailable: The store did not answer: the file may be stored now or later.
        """
        if not order.url.startswith(f"{self._own}/"):
            raise BadInput(f"{order.url} is not below {self._own}")
        key = (order.url, order.name, order.sha256)
        if order.offset == 0:
            self._pieces[key] = bytearray()
            while len(self._pieces) > AT_ONCE:
                self._pieces.popitem(last=False)
        data = self._pieces.get(key)
        end = order.offset + len(order.data)
        if data is None or len(data) < order.offset or end > order.size:
            raise Conflict(f"{order.name}: a piece at {order.offset} of {order.size}, but others are missing")
        data[order.offset :] = order.data
        if end < order.size:
            return Ack()
        if hashlib.sha256(data).hexdigest() != order.sha256:
            raise BadMessage(f"{order.name}: its SHA-256 is not the one that was ordered")
        try:
            async with asyncio.timeout(self._write_s), self._lane:
                await self._write(order, bytes(data))
        except TimeoutError:
            raise Unavailable(f"{order.url}: no answer in {self._write_s:g} s to {order.name}") from None
        self._pieces.pop(key, None)
        return Ack()

    async def _write(self, order: PublishFile, data: bytes) -> None:
        artifacts = await open_url(order.url, self._bus)
        if order.name != MANIFEST_NAME:
            await artifacts.put_bytes(order.name, data)
            return
        manifest = parse_manifest(data, f"{order.url}/{order.name}")
        if missing := await _missing(artifacts, manifest):
            raise Conflict(missing)
        await artifacts.put_bytes(order.name, data)
        if missing := await _missing(artifacts, manifest):  # files were removed meanwhile: no manifest then
            await artifacts.delete(order.name)
            raise Conflict(missing)


async def _missing(artifacts: Artifacts, manifest: CheckpointManifest) -> str:
    """The first missing file of a checkpoint, or one of a wrong size, in words; empty if there is none."""
    problems = await asyncio.gather(*(_problem(artifacts, *item) for item in manifest.files.items()))
    return next(filter(None, problems), "")


async def _problem(artifacts: Artifacts, name: str, file: CheckpointFile) -> str:
    try:
        size = await artifacts.size(name)
    except NotFound:
        return (
            f"{artifacts.url}: {name} was written and is not there as this instance's node sees it; "
            "artifacts has to be one and the same folder on all nodes"
        )
    return "" if size == file.bytes else f"{artifacts.url}: {name} has {size} bytes of {file.bytes}"
