"""The local store of an instance (draft §6): a thread of its own between the instance and a SQLite file.

Whoever records something appends to a queue and goes on: neither the event loop nor the compute thread ever
waits for a disk. The thread commits once a second what has come together. A store that can't be written
costs its own rows and one warning, never the instance.
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
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from bus.logs import get_logger
from schemas.errors import Unavailable
from schemas.step import Member
from schemas.store import StoreQuery, StoreRows, StoreTable
from workers.store.store_file import Row, StoreFile, says_damage
from workers.store.store_schema import SCHEMA_VERSION, StoreLimits

log = get_logger("local-store")

Result = TypeVar("Result")
Values = Mapping[str, Any]

PENDING_ROWS = 10_000
"""Rows that wait for a commit. Beyond it metrics are dropped, beyond twice as many all; both are counted."""
PENDING_QUESTIONS = 32
"""Questions that wait for the thread; beyond it they are refused."""
REOPEN_S = 10.0
"""Seconds between two attempts to open a file that can't be opened."""
CLOSE_S = 2.0
"""Seconds that the last commit may take before the instance leaves without it."""


class LocalStore:
    """`async with LocalStore(folder, member) as store:`. Opening and closing happen on the thread, too.

    Args:
        folder: the instance's own folder on its node, the same for each incarnation of the SID; None: there
            is no store, nothing is kept and questions are refused.
        member: whose rows these are.
        limits: bounds on the file and on answers.
        commit_s: seconds between two commits: longer costs less, and a kill more.
    """

    def __init__(
        self,
        folder: Path | None,
        member: Member,
        *,
        limits: StoreLimits | None = None,
        commit_s: float = 1.0,
    ) -> None:
        self.member = member
        self.dropped = 0
        """Rows that found no room, since the last commit."""
        self._limits = limits or StoreLimits()
        self._file = None if folder is None else StoreFile(folder, self._limits)
        self._commit_s = commit_s
        self._pending: deque[tuple[StoreTable, float, Values | Callable[[], Values]]] = deque()
        self._questions: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._trouble = ""
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
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, CLOSE_S)

    # --- any thread -----------------------------------------------------------------------------------
    def add(self, table: StoreTable, values: Values | Callable[[], Values]) -> None:
        """Records a row, now. Never waits, never raises.

        Args:
            table: which one.
            values: by column, without `id`, `at` and `incarnation`; or what gives them, on the thread.
        """
        waiting = len(self._pending)
        if self._file is None or self._closing:
            return
        if waiting >= PENDING_ROWS and (table == "metrics" or waiting >= 2 * PENDING_ROWS):
            self.dropped += 1
            return
        self._pending.append((table, time.time(), values))

    # --- the event loop -------------------------------------------------------------------------------
    async def query(self, query: StoreQuery) -> StoreRows:
        """What a question asks for, including everything that was recorded before it.

        Raises:
            BadInput: there is no such column.
            Unavailable: there is no store, it can't be read now, or too many questions wait.
        """
        found = await self._ask(lambda file: file.read(query))
        # Made of what the file gave: checking a thousand rows again would keep the event loop busy.
        return StoreRows.model_construct(
            member=self.member,
            table=query.table,
            columns=found.columns,
            rows=found.rows,
            last_id=found.last_id,
            truncated=found.truncated,
            schema_version=SCHEMA_VERSION,
        )

    async def flush(self) -> None:
        """Returns once everything that was recorded before is committed.

        Raises:
            Unavailable: it can't be written now.
        """

        def committed(file: StoreFile) -> None:
            if self._trouble:
                raise self._off()

        await self._ask(committed)

    async def _ask(self, call: Callable[[StoreFile], Result]) -> Result:
        sid = self.member.sid
        if self._file is None or self._closing or not self._thread.is_alive():
            raise Unavailable(f"{sid} keeps no local store" if self._file is None else f"{sid} is ending")
        if len(self._questions) >= PENDING_QUESTIONS:
            raise Unavailable(
                f"the local store of {sid} has {PENDING_QUESTIONS} questions waiting; ask later"
            )
        file, future = self._file, Future[Result]()
        self._questions.append((lambda: call(file), future))
        self._wake.set()
        return await asyncio.wrap_future(future)

    # --- the store's thread ---------------------------------------------------------------------------
    def _run(self) -> None:
        assert self._file is not None
        while True:
            closing = self._closing  # what is recorded after this is not promised to be kept
            self._wake.clear()
            asked = len(self._questions)  # they see all that was recorded before them: commit first
            try:
                self._commit(self._file)
            except Exception as error:  # ours: the rows are lost, the instance goes on
                log.error("local store failed", sid=self.member.sid, exc_info=error)
            for _ in range(asked):
                self._answer(self._file, *self._questions.popleft())
            if closing:
                self._file.close()
                while self._questions:
                    self._answer(self._file, *self._questions.popleft())
                return
            self._wake.wait(self._commit_s)

    def _commit(self, file: StoreFile) -> None:
        rows: list[Row] = []
        try:
            self._open(file)
            rows = self._take()
            self._write(file, rows)
        except (sqlite3.Error, OSError) as error:
            text = " ".join(str(error).split())
            if not self._trouble:
                log.warning(
                    "local store can't be written, rows wait",
                    sid=self.member.sid,
                    file=str(file.path),
                    reason=text,
                )
            self._trouble = text
            self._put_back(rows)
            if not file.path.exists():  # somebody removed it: what is written to it would be lost
                file.close()
            self._reopen_at = time.monotonic() + REOPEN_S
            return
        if self._trouble and file.is_open:
            self._trouble = ""
            log.info("local store is written again", sid=self.member.sid)

    def _open(self, file: StoreFile) -> None:
        if file.is_open or time.monotonic() < self._reopen_at:
            return
        existed = file.path.exists()
        damage = file.open()
        self._say_opened(file, damage, existed)

    def _write(self, file: StoreFile, rows: list[Row]) -> None:
        if not file.is_open:
            self._put_back(rows)
            return
        try:
            file.write(rows)
        except sqlite3.DatabaseError as error:
            if not says_damage(error):
                raise
            self._say_opened(file, file.begin_anew(str(error)), existed=True)
            file.write(rows)

    def _say_opened(self, file: StoreFile, damage: str, existed: bool) -> None:
        """One line for people and one event for the store itself: whom this incarnation follows."""
        mine = self.member.incarnation
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
        file.write([("events", {"at": time.time(), "incarnation": mine, "kind": "store", "text": text})])

    def _take(self) -> list[Row]:
        """The rows that wait, folded, in the form that the file takes."""
        rows: list[Row] = []
        if self._file is None or not self._file.is_open:
            return rows
        incarnation = self.member.incarnation
        while self._pending:
            table, at, values = self._pending.popleft()
            try:
                given = values() if callable(values) else values
            except Exception as error:  # a sample that can't be told: not worth the others
                log.error("row not recorded", sid=self.member.sid, table=table, exc_info=error)
                continue
            rows.append((table, {"at": at, "incarnation": incarnation, **given}))
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
        with suppress(RuntimeError):  # whoever asked has gone, its event loop too
            try:
                if not file.is_open:
                    raise self._off()
                result = call()
            except (sqlite3.Error, OSError) as error:
                future.set_exception(Unavailable(f"{self._off().text}: {' '.join(str(error).split())}"))
                self._mend(file, error)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _mend(self, file: StoreFile, error: sqlite3.Error | OSError) -> None:
        """What a question stumbled over is put right for the next one."""
        if not says_damage(error):
            return
        try:
            self._say_opened(file, file.begin_anew(str(error)), existed=True)
        except (sqlite3.Error, OSError) as again:
            log.warning("local store can't be begun anew", sid=self.member.sid, reason=str(again))

    def _off(self) -> Unavailable:
        why = f": {self._trouble}" if self._trouble else ""
        return Unavailable(f"the local store of {self.member.sid} can't be used now{why}")


def fold(rows: list[Row]) -> list[Row]:
    """One audit row for all orders of a batch that were obeyed and differ in their step alone.

    `count` says how many they were, `step` and `at` are the last one's, `took_ms` is their sum. Refused
    orders stay apart. At ten steps a second the audit so reaches ten times as far back.
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
