"""A record that only its orchestrator writes, in a bucket: each write names the revision of the one before.

So nobody overwrites what a newer leader has written. A write whose answer was lost is looked up, not guessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from bus.logs import get_logger
from bus.messaging.key_value import Bucket, KeyValueEntry
from schemas.base import Message
from schemas.errors import Conflict, Fenced, Unavailable

log = get_logger("orchestrator")


class OwnedRecord:
    """Writes one record.

    Args:
        bucket: Where it lies.
        key: The tokens of its key; the first one's name is what it is a record of.
        revision: Of the present record; 0: there is none.
        is_ours: Whether a record that is found was written by this leader.
        confirmed: Returns if this orchestrator surely leads: then nobody else can have written, and a record
            that was removed or can't be read is written again. None: such a record is given up.
        retry_s: Pause before a failed write is repeated, without a limit: the bus's disk may be full.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: dict[str, str],
        revision: int,
        is_ours: Callable[[KeyValueEntry], bool],
        confirmed: Callable[[], Awaitable[None]] | None,
        retry_s: float,
    ) -> None:
        self._bucket = bucket
        self._key: dict[str, Any] = dict(key)
        self._revision = revision
        self._is_ours = is_ours
        self._confirmed = confirmed
        self._retry_s = retry_s
        self._lock = asyncio.Lock()

    async def write(self, present: Callable[[], Message]) -> None:
        """Writes the record as it is when its turn comes; repeats that while the bus is away.

        Raises:
            Fenced: another leader has the record.
            NewerRecord: the record has a version that this software can't read.
        """
        async with self._lock:
            unknown = False  # whether a write of ours may have arrived without an answer
            while True:
                try:
                    if unknown:
                        await self._find()
                    self._revision = await self._put(present())
                    return
                except Conflict:
                    unknown = True
                except Unavailable:
                    unknown = True
                    await asyncio.sleep(self._retry_s)

    async def confirm(self) -> None:
        """Reads from the bucket whether the record is still this leader's.

        Raises:
            Fenced, NewerRecord: it is not.
            Unavailable: the bus does not answer.
        """
        async with self._lock:
            await self._find()

    async def _put(self, record: Message) -> int:
        if self._revision:
            return await self._bucket.update(record, revision=self._revision, **self._key)
        return await self._bucket.create(record, **self._key)

    async def _find(self) -> None:
        """Takes over the bucket's revision if it is the known one, or that of a later write of ours."""
        entry = await self._bucket.get(leader=True, **self._key)
        revision = await self._bucket.revision(**self._key) if entry is None else entry.revision
        if revision == self._revision:
            return
        what = " ".join(next(iter(self._key.items())))
        if (entry is None or entry.stale) and self._confirmed is not None:
            await self._confirmed()
            log.error(f"record of {what} written again", why="unreadable" if revision else "removed")
            self._revision = revision
            return
        if entry is None or not self._is_ours(entry):
            raise Fenced(f"the record of {what} is another orchestrator's now (revision {revision})")
        self._revision = entry.revision
