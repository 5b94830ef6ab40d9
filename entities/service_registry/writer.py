"""Writes the registry's records to the bucket: in batches, each record by compare-and-set.

While one batch is written the next one gathers, like group commit in a database: a burst of registrations
costs a few round trips, a single registration costs one. Each write names the revision that its key must
have, so that a registry that was frozen during a takeover can't overwrite its successor's records.
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
    """The outcome of several records that one caller waits for together."""

    def __init__(self, count: int) -> None:
        self.errors: dict[str, DmscError] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._remaining = count

    def settle(self, sid: str, error: DmscError | None) -> None:
        if error is not None:
            self.errors[sid] = error
        self._remaining -= 1
        if not self._remaining and not self.done.done():  # else the caller was cancelled
            self.done.set_result(None)


class RegistryWriter:
    """Writes what `read(sid)` returns at the time of the write; None deletes the key.

    Args of the constructor:
        bucket: The bucket of the records.
        read: Returns the present record of a SID.
        confirmed: Returns while this registry leads; waits otherwise.
        written: Called with the SIDs of each batch once the bucket has them.
        lot: Most records per batch.
        retry_s: Pause before a failed batch is repeated.
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
        self._in_flight: dict[str, list[_Receipt]] = {}
        self._has_work = asyncio.Event()

    def knows(self, sid: str, revision: int) -> None:
        """Note the revision that the bucket has for this record."""
        self._revisions[sid] = revision

    def soon(self, sids: Collection[str]) -> None:
        """Queue these records for writing, without waiting for it."""
        for sid in sids:
            self._waiting.setdefault(sid, [])
        if sids:
            self._has_work.set()

    async def write(self, sids: Collection[str]) -> None:
        """Write these records; return once the bucket has them or newer ones.

        Raises:
            BadMessage: the bucket will never take one of them.
        """
        for error in (await self.write_each(sids)).values():
            raise error

    async def write_each(self, sids: Collection[str]) -> dict[str, DmscError]:
        """Like `write`, but return the errors of records that the bucket will never take, by SID."""
        self.soon(sids)
        return await self._wait([self._waiting[sid] for sid in sids])

    async def settled(self, sids: Iterable[str]) -> None:
        """Wait until no write of these is pending: the write of a repeated request may still be under way."""
        waiting, in_flight = self._waiting, self._in_flight
        pending = [waiting[sid] if sid in waiting else in_flight.get(sid) for sid in sids]
        await self._wait([receipts for receipts in pending if receipts is not None])

    @staticmethod
    async def _wait(pending: Collection[list[_Receipt]]) -> dict[str, DmscError]:
        if not pending:
            return {}
        receipt = _Receipt(len(pending))
        for receipts in pending:
            receipts.append(receipt)
        await receipt.done
        return receipt.errors

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._has_work.wait()
            batch = list(itertools.islice(self._waiting, self._lot))
            self._in_flight = {sid: self._waiting.pop(sid) for sid in batch}
            if not self._waiting:
                self._has_work.clear()
            await self._write(batch)
            self._in_flight = {}

    async def _write(self, sids: list[str]) -> None:
        while sids:
            await self._confirmed()
            writings = [
                Writing({"sid": sid}, self._read(sid), self._revisions.get(sid, 0)) for sid in sids
            ]  # the newest records, even if this write waited for an older one
            outcomes = await self._bucket.write_many(writings)
            done, repeats, problem = [], [], None
            for sid, writing, outcome in zip(sids, writings, outcomes, strict=True):
                if isinstance(outcome, BadMessage):
                    log.error("record can't be written", sid=sid, error=outcome.text)
                    self._settle(sid, outcome)
                    continue
                if isinstance(outcome, DmscError):
                    try:
                        known = await self._refresh_revision(sid, outcome)
                    except NewerRecord as newer:  # written by a newer version: must not be overwritten
                        log.error("record can't be written", sid=sid, error=newer.text)
                        self._settle(sid, newer)
                        continue
                    repeats.append(sid)
                    if not known:
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
                    self._settle(sid)
            if problem is not None:
                log.warning(
                    "records not written yet", count=len(repeats), code=problem.code, error=problem.text
                )
                await asyncio.sleep(self._retry_s)
            sids = repeats

    def _settle(self, sid: str, error: DmscError | None = None) -> None:
        for receipt in self._in_flight.pop(sid, ()):
            receipt.settle(sid, error)

    async def _refresh_revision(self, sid: str, error: DmscError) -> bool:
        """Whether the write may be repeated at once, now that the key's revision is known.

        A conflict comes from the marker of a deleted key, from our own write whose answer was lost, or from a
        write of the previous leader. Our next write is newer than all of them.
        """
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
