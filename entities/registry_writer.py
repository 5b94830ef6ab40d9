"""The registry's records on their way into the bucket: many at a time, each by compare-and-set.

While one lot is written the next one gathers, as a database commits in groups: a storm of registrations
costs a few round trips, a single one costs one. Each write names the revision that its key must have, so
that a registry that was frozen while another one took over can't overwrite what that one wrote.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection

from bus.buckets import Bucket, Writing
from bus.logs import get_logger
from bus.packed import Packed
from schemas.errors import BadMessage, Conflict, DmscError
from schemas.registry import ServiceRecord

log = get_logger("service-registry")

Read = Callable[[str], Packed[ServiceRecord] | None]


class RegistryWriter:
    """Writes what `read(sid)` gives at that moment: None deletes.

    Args of the constructor:
        bucket: Where the records are.
        read: The present record.
        confirmed: Returns while we lead; waits otherwise.
        written: Told the SIDs of each lot once the bucket has them.
        lot: Most records in flight.
        retry_s: Pause before a lot that the bucket did not take is repeated.
    """

    def __init__(
        self,
        bucket: Bucket,
        read: Read,
        confirmed: Callable[[], Awaitable[None]],
        written: Callable[[Collection[str]], None],
        *,
        lot: int,
        retry_s: float,
    ) -> None:
        self._bucket = bucket
        self._read = read
        self._confirmed = confirmed
        self._written = written
        self._lot = lot
        self._retry_s = retry_s
        self._revisions: dict[str, int] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._flying: dict[str, list[asyncio.Future[None]]] = {}
        self._something = asyncio.Event()

    def knows(self, sid: str, revision: int) -> None:
        """The bucket holds this record with this revision."""
        self._revisions[sid] = revision

    def soon(self, sids: Collection[str]) -> None:
        """Have these written, without waiting for it."""
        for sid in sids:
            self._waiting.setdefault(sid, [])
        if sids:
            self._something.set()

    async def write(self, sids: Collection[str]) -> None:
        """Returns once the bucket has these, or newer ones.

        Raises:
            BadMessage: the bucket will never take one of them.
        """
        self.soon(sids)
        for future in [self._told(self._waiting[sid]) for sid in sids]:
            await future

    async def settled(self, sid: str) -> None:
        """Returns once nothing of this record is on its way: what is repeated may not be written yet."""
        for pending in (self._waiting, self._flying):
            if sid in pending:
                await self._told(pending[sid])
                return

    @staticmethod
    def _told(those: list[asyncio.Future[None]]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        those.append(future)
        return future

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._something.wait()
            chosen = list(itertools.islice(self._waiting, self._lot))
            self._flying = {sid: self._waiting.pop(sid) for sid in chosen}
            if not self._waiting:
                self._something.clear()
            await self._write(chosen)
            self._flying = {}

    async def _write(self, left: list[str]) -> None:
        while left:
            await self._confirmed()
            writings = [
                Writing({"sid": sid}, self._read(sid), self._revisions.get(sid, 0)) for sid in left
            ]  # the newest, also where this write waited for an older one
            outcomes = await self._bucket.write_many(writings)
            done, again, problem = [], [], None
            for sid, writing, outcome in zip(left, writings, outcomes, strict=True):
                if isinstance(outcome, BadMessage):
                    log.error("record can't be written", sid=sid, error=outcome.text)
                    self._tell(sid, outcome)
                    continue
                if isinstance(outcome, DmscError):
                    again.append(sid)
                    if not await self._resolved(sid, outcome):
                        problem = outcome
                    continue
                done.append(sid)
                if writing.message is None:
                    self._revisions.pop(sid, None)
                else:
                    self._revisions[sid] = outcome
            if done:
                self._written(done)
                for sid in done:
                    self._tell(sid)
            if problem is not None:
                log.warning(
                    "records not written yet", count=len(again), code=problem.code, error=problem.text
                )
                await asyncio.sleep(self._retry_s)
            left = again

    def _tell(self, sid: str, error: DmscError | None = None) -> None:
        for future in self._flying.pop(sid, ()):
            if future.done():
                continue  # whoever asked has left
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    async def _resolved(self, sid: str, error: DmscError) -> bool:
        """Whether the write may be repeated at once: a mark of a deleted key, a write of ours whose answer
        was lost, or one of the registry before us stood there. What we write next is newer than all."""
        if not isinstance(error, Conflict):
            return False
        try:
            self._revisions[sid] = await self._bucket.revision(sid=sid)
        except DmscError as failure:
            log.debug("revision not read", sid=sid, error=failure.text)
            return False
        return True
