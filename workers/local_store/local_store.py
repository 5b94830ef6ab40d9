"""The local store of an instance (draft §6): a thread between the instance and a SQLite file.

Recording only appends to a queue: neither the event loop nor the compute thread ever waits for a disk. The
thread commits the queued rows once a second. A store that can't be written costs its rows and one warning,
never the instance.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from bus.logs import get_logger
from schemas.errors import Unavailable
from schemas.step import Member
from schemas.store import StoreQuery, StoreRows, StoreTable
from workers.local_store.store_file import Row, StoreFile, says_damage
from workers.local_store.store_schema import SCHEMA_VERSION, StoreLimits

log = get_logger("local-store")

Result = TypeVar("Result")
Values = Mapping[str, Any]

PENDING_ROWS = 10_000
"""Rows that may wait for a commit. Beyond it metrics are dropped, beyond twice as many all rows; both are
counted."""
PENDING_QUERIES = 32
"""Queries that may wait for the thread; beyond it they are refused."""


@dataclass(frozen=True, kw_only=True)
class LocalStoreTimes:
    """Seconds of a store's thread."""

    commit_s: float = 1.0
    """Between two commits; longer costs less, but a kill loses more."""
    reopen_s: float = 10.0
    """Between two attempts to open a file."""
    close_s: float = 2.0
    """That the last commit may take; then the instance ends without it."""


class LocalStore:
    """One instance's store: `async with LocalStore(folder, member) as store:`.

    The file is opened and closed on the thread, too.

    Args:
        folder: The instance's own folder on its node, the same for each incarnation of the SID; None: there
            is no store, nothing is kept and queries are refused.
        member: The incarnation that records.
        limits: Bounds on the file and on answers.
        times: Pauses and timeouts.
    """

    def __init__(
        self,
        folder: Path | None,
        member: Member,
        *,
        limits: StoreLimits | None = None,
        times: LocalStoreTimes = LocalStoreTimes(),
    ) -> None:
        self.member = member
        self.dropped = 0
        """Rows dropped since the last commit."""
        self._limits = limits or StoreLimits()
        self._file = None if folder is None else StoreFile(folder, self._limits)
        self._times = times
        self._pending: deque[tuple[StoreTable, float, Values | Callable[[], Values]]] = deque()
        self._queries: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._problem = ""
        self._reopen_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"store-{member.sid}", daemon=True)

    async def __aenter__(self) -> Self:
        if self._file is not None:
            self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, self._times.close_s)

    # --- any thread -----------------------------------------------------------------------------------
    def add(self, table: StoreTable, values: Values | Callable[[], Values]) -> None:
        """Records a row with the present time. Never waits, never raises.

        Args:
            table: The table of the row.
            values: Values by column, without `id`, `at` and `incarnation`; or a function that returns them,
                called on the thread.
        """
        pending = len(self._pending)
        if self._file is None or self._closing:
            return
        if pending >= PENDING_ROWS and (table == "metrics" or pending >= 2 * PENDING_ROWS):
            self.dropped += 1
            return
        self._pending.append((table, time.time(), values))

    # --- the event loop -------------------------------------------------------------------------------
    async def query(self, query: StoreQuery) -> StoreRows:
        """The rows that a query asks for, including all that were recorded before it.

        Raises:
            BadInput: There is no such column.
            Unavailable: There is no store, it can't be read now, or too many queries wait.
        """
        result = await self._call_on_thread(lambda file: file.read(query))
        # Not validated again: a thousand rows would keep the event loop busy.
        return StoreRows.model_construct(
            member=self.member,
            table=query.table,
            columns=result.columns,
            rows=result.rows,
            last_id=result.last_id,
            truncated=result.truncated,
            schema_version=SCHEMA_VERSION,
        )

    async def flush(self) -> None:
        """Returns once all rows recorded before are committed.

        Raises:
            Unavailable: The store can't be written now.
        """

        def committed(file: StoreFile) -> None:
            if self._problem:
                raise self._unavailable()

        await self._call_on_thread(committed)

    async def _call_on_thread(self, call: Callable[[StoreFile], Result]) -> Result:
        sid = self.member.sid
        if self._file is None or self._closing or not self._thread.is_alive():
            raise Unavailable(f"{sid} keeps no local store" if self._file is None else f"{sid} is ending")
        if len(self._queries) >= PENDING_QUERIES:
            raise Unavailable(f"the local store of {sid} has {PENDING_QUERIES} questions waiting; ask later")
        file, future = self._file, Future[Result]()
        self._queries.append((lambda: call(file), future))
        self._wake.set()
        return await asyncio.wrap_future(future)

    # --- the store's thread ---------------------------------------------------------------------------
    def _run(self) -> None:
        assert self._file is not None
        while True:
            closing = self._closing  # rows recorded after this line may be lost
            self._wake.clear()
            query_count = len(self._queries)  # counted before the commit: they see all rows recorded before
            try:
                self._commit(self._file)
            except Exception as error:  # a bug: the rows are lost, the instance goes on
                log.error("local store failed", sid=self.member.sid, exc_info=error)
            for _ in range(query_count):
                self._answer(self._file, *self._queries.popleft())
            if closing:
                self._file.close()
                while self._queries:
                    self._answer(self._file, *self._queries.popleft())
                return
            self._wake.wait(self._times.commit_s)

    def _commit(self, file: StoreFile) -> None:
        rows: list[Row] = []
        try:
            self._open(file)
            rows = self._take()
            self._write(file, rows)
        except (sqlite3.Error, OSError) as error:
            text = " ".join(str(error).split())
            if not self._problem:
                log.warning(
                    "local store can't be written, rows wait",
                    sid=self.member.sid,
                    file=str(file.path),
                    reason=text,
                )
            self._problem = text
            self._put_back(rows)
            if not file.path.exists():  # it was removed: rows written to it would be lost
                file.close()
            self._reopen_at = time.monotonic() + self._times.reopen_s
            return
        if self._problem and file.is_open:
            self._problem = ""
            log.info("local store is written again", sid=self.member.sid)

    def _open(self, file: StoreFile) -> None:
        if file.is_open or time.monotonic() < self._reopen_at:
            return
        existed = file.path.exists()
        damage = file.open()
        self._record_opening(file, damage, existed)

    def _write(self, file: StoreFile, rows: list[Row]) -> None:
        if not file.is_open:
            self._put_back(rows)
            return
        try:
            file.write(rows)
        except sqlite3.DatabaseError as error:
            if not says_damage(error):
                raise
            self._record_opening(file, file.begin_anew(str(error)), existed=True)
            file.write(rows)

    def _record_opening(self, file: StoreFile, damage: str, existed: bool) -> None:
        """Logs a damaged file, and records as an event after which incarnation this one follows."""
        incarnation = self.member.incarnation
        if damage:
            aside = file.aside.name
            log.warning(
                "local store was damaged: moved aside, begun anew",
                sid=self.member.sid,
                file=str(file.aside),
                reason=damage,
            )
            text = f"begun anew; the former file was unusable ({damage}) and is now {aside}"
        elif not existed:
            text = "begun"
        else:
            last = file.read(StoreQuery(job="-", table="events", newest=True, limit=1)).rows
            if last:
                _, _, former, kind, _, words = last[0]
                text = f"goes on after incarnation {former}, whose last event was {kind}: {words}"
            else:
                text = "goes on"
        event = {"at": time.time(), "incarnation": incarnation, "kind": "store", "text": text}
        file.write([("events", event)])

    def _take(self) -> list[Row]:
        """Takes the pending rows, folded, in the form that the file takes."""
        rows: list[Row] = []
        if self._file is None or not self._file.is_open:
            return rows
        incarnation = self.member.incarnation
        while self._pending:
            table, at, values = self._pending.popleft()
            try:
                columns = values() if callable(values) else values
            except Exception as error:  # only this row is lost, not the others
                log.error("row not recorded", sid=self.member.sid, table=table, exc_info=error)
                continue
            rows.append((table, {"at": at, "incarnation": incarnation, **columns}))
        if self.dropped:
            count, self.dropped = self.dropped, 0
            lost = {"kind": "lost", "text": f"{count} rows found no room while the disk was slow"}
            rows.append(("events", {"at": time.time(), "incarnation": incarnation, **lost}))
        return fold(rows)

    def _put_back(self, rows: list[Row]) -> None:
        for table, values in reversed(rows):
            self._pending.appendleft((table, values["at"], values))

    def _answer(self, file: StoreFile, call: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        with suppress(RuntimeError):  # the caller's event loop has ended
            try:
                if not file.is_open:
                    raise self._unavailable()
                result = call()
            except (sqlite3.Error, OSError) as error:
                future.set_exception(
                    Unavailable(f"{self._unavailable().text}: {' '.join(str(error).split())}")
                )
                self._recover(file, error)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _recover(self, file: StoreFile, error: sqlite3.Error | OSError) -> None:
        """Begins a new file after a query found the present one damaged."""
        if not says_damage(error):
            return
        try:
            self._record_opening(file, file.begin_anew(str(error)), existed=True)
        except (sqlite3.Error, OSError) as failure:
            log.warning("local store can't be begun anew", sid=self.member.sid, reason=str(failure))

    def _unavailable(self) -> Unavailable:
        why = f": {self._problem}" if self._problem else ""
        return Unavailable(f"the local store of {self.member.sid} can't be used now{why}")


def fold(rows: list[Row]) -> list[Row]:
    """Combines the obeyed orders of a batch that differ only in their step into one audit row.

    `count` is their number, `step` and `at` are the last one's, `took_ms` is their sum. Refused orders keep
    their own rows. At ten steps a second the audit thus reaches ten times as far back.
    """
    folded: list[Row] = []
    places: dict[tuple[Any, ...], int] = {}
    for table, values in rows:
        if table != "audit" or values.get("outcome") != "obeyed":
            folded.append((table, values))
            continue
        key = tuple(values.get(name) for name in ("sender", "sender_incarnation", "what", "epoch", "reason"))
        place = places.get(key)
        if place is None:
            places[key] = len(folded)
            folded.append((table, {"count": 1, **values}))
            continue
        first = folded[place][1]
        folded[place] = (
            table,
            {
                **values,
                "count": first["count"] + values.get("count", 1),
                "took_ms": (first.get("took_ms") or 0.0) + (values.get("took_ms") or 0.0),
            },
        )
    return folded
