"""The registry's records on their way into the bucket: many at a time, each by compare-and-set.

While one lot is written the next one gathers, as a database commits in groups: a storm of registrations
costs a few round trips, a single one costs one. Each write names the revision that its key must have, so
that a registry that was frozen while another one took over can't overwrite what that one wrote.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable

from bus.logs import get_logger
from bus.messaging.key_value import Bucket, Writing
from bus.wire.packed import Packed
from schemas.errors import BadMessage, Conflict, DmscError, NewerRecord
from schemas.registry import ServiceRecord

log = get_logger("service-registry")

Read = Callable[[str], Packed[ServiceRecord] | None]


class _Receipt:
    """Of records that somebody waits for, all together."""

    def __init__(self, count: int) -> None:
        self.errors: dict[str, DmscError] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = count

    def told(self, sid: str, error: DmscError | None) -> None:
        if error is not None:
            self.errors[sid] = error
        self._left -= 1
        if not self._left and not self.done.done():  # else whoever asked has left
            self.done.set_result(None)


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
        self._waiting: dict[str, list[_Receipt]] = {}
        self._flying: dict[str, list[_Receipt]] = {}
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
        for error in (await self.write_each(sids)).values():
            raise error

    async def write_each(self, sids: Collection[str]) -> dict[str, DmscError]:
        """As `write`; returns why the bucket will never take some of them."""
        self.soon(sids)
        return await self._told([self._waiting[sid] for sid in sids])

    async def settled(self, sids: Iterable[str]) -> None:
        """Returns once nothing of these is on its way: what is repeated may not be written yet."""
        waiting, flying = self._waiting, self._flying
        pending = [waiting[sid] if sid in waiting else flying.get(sid) for sid in sids]
        await self._told([those for those in pending if those is not None])

    @staticmethod
    async def _told(pending: Collection[list[_Receipt]]) -> dict[str, DmscError]:
        if not pending:
            return {}
        receipt = _Receipt(len(pending))
        for each in pending:
            each.append(receipt)
        await receipt.done
        return receipt.errors

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
                    try:
                        resolved = await self._resolved(sid, outcome)
                    except NewerRecord as newer:  # not ours to overwrite
                        log.error("record can't be written", sid=sid, error=newer.text)
                        self._tell(sid, newer)
                        continue
                    again.append(sid)
                    if not resolved:
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
        for receipt in self._flying.pop(sid, ()):
            receipt.told(sid, error)

    async def _resolved(self, sid: str, error: DmscError) -> bool:
        """Whether the write may be repeated at once: a mark of a deleted key, a write of ours whose answer
        was lost, or one of the registry before us stood there. What we write next is newer than all."""
        if not isinstance(error, Conflict):
            return False
        try:
            self._revisions[sid] = await self._bucket.revision(sid=sid)
        except NewerRecord:
            raise
        except DmscError as failure:
            log.debug("revision not read", sid=sid, error=failure.text)
            return False
        return True
