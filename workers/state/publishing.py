"""Files that the orchestrator has an instance write below the job's own artifacts: a checkpoint's manifest,
and the weights' list."""

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
"""Files whose pieces are kept; a further one takes the place of the first."""
WRITE_S = 60.0
"""How long an artifact store may take, parts looked for included."""


class Publisher:
    """Takes pieces, and writes what is complete.

    Args:
        bus: where artifacts may lie.
        own: URL of the job's own part of its artifacts: nothing is written elsewhere.
    """

    def __init__(self, bus: Bus, own: str) -> None:
        self._bus = bus
        self._own = own
        self._pieces: OrderedDict[tuple[str, str, str], bytearray] = OrderedDict()
        self._lane = asyncio.Lock()

    async def take(self, order: PublishFile) -> Ack:
        """Answers the last piece once the file is there. Idempotent.

        Raises:
            Conflict: a piece before is missing; or the file is a manifest, and what it lists is not there.
            Unavailable: the store did not answer: the file may be there, or come to be.
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
            async with asyncio.timeout(WRITE_S), self._lane:
                await self._write(order, bytes(data))
        except TimeoutError:
            raise Unavailable(f"{order.url}: no answer in {WRITE_S:g} s to {order.name}") from None
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
        if missing := await _missing(
            artifacts, manifest
        ):  # somebody removed them: so does not the manifest stay
            await artifacts.delete(order.name)
            raise Conflict(missing)


async def _missing(artifacts: Artifacts, manifest: CheckpointManifest) -> str:
    """What of a checkpoint is not there, or not in its size; empty: nothing."""
    problems = await asyncio.gather(*(_problem(artifacts, *one) for one in manifest.files.items()))
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
