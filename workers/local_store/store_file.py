"""One instance's store as a SQLite file: opened, checked, written in batches, bounded, read.

It is synchronous, for one thread. It uses write-ahead logging (WAL), so that a killed process loses at most
the batch that it was writing, and no committed row. A file that is damaged nevertheless, or of another
schema, is moved aside and a new one is begun: a store's content helps, but nothing depends on it.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import BadInput
from schemas.store import Scalar, StoreQuery, StoreTable
from workers.local_store.store_schema import APPLICATION_ID, COLUMNS, SCHEMA_VERSION, StoreLimits, statements

if TYPE_CHECKING:
    from collections.abc import Iterator

Row = tuple[StoreTable, Mapping[str, Any]]
"""A row to be written: its table, and values by column; a column without one is NULL."""

FILE_NAME = "store.sqlite"
DAMAGED_SUFFIX = ".damaged"
"""Suffix of a file that was moved aside; there is at most one."""

LOG_PAGES = 256
"""Pages of the write-ahead log (4 KiB each) at which it is written back into the file."""
TARGET_SHARE = 0.9
"""Share of the bound on bytes down to which old rows are deleted at once."""
_INTEGER_BOUND = 1 << 63

_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_INTERRUPT,
}
"""Errors that do not mean a damaged file: a full disk, a folder that is not writable, a lock."""


class Unusable(Exception):
    """The file is not a store of this schema; the text says why."""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Scalar, ...], ...]
    last_id: int
    truncated: bool


class StoreFile:
    """The file `store.sqlite` in `folder`. Raises `sqlite3.Error` and `OSError`, unless said otherwise.

    A lock is waited for up to `busy_s`: a former incarnation that is being ended may still write.
    """

    def __init__(self, folder: Path, limits: StoreLimits, *, busy_s: float = 2.0) -> None:
        self.path = folder / FILE_NAME
        self._limits = limits
        self._busy_s = busy_s
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    @property
    def aside(self) -> Path:
        """The path to which an unusable file is moved."""
        return self.path.with_name(self.path.name + DAMAGED_SUFFIX)

    def open(self) -> str:
        """Opens or creates the file. Returns why an unusable one was moved aside, else an empty text."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._open()
        except (sqlite3.DatabaseError, Unusable) as error:
            if not says_damage(error):
                self.close()
                raise
            return self.begin_anew(str(error))
        return ""

    def begin_anew(self, why: str) -> str:
        """Moves the file aside (replacing one that was moved before) and creates a new one; returns `why`."""
        self.close()
        for suffix in ("", "-wal", "-shm"):
            part = self.path.with_name(self.path.name + suffix)
            aside = self.aside.with_name(self.aside.name + suffix)
            aside.unlink(missing_ok=True)
            if part.exists():
                part.replace(aside)
        try:
            self._open()
        except (sqlite3.Error, Unusable):
            self.close()
            raise
        return why

    def close(self) -> None:
        """Writes the log back into the file and closes it. Idempotent."""
        for connection in (self._reader, self._writer):
            if connection is not None:
                with suppress(sqlite3.Error):  # committed rows stay in the log, from which they are recovered
                    connection.close()
        self._reader = self._writer = None

    # --- write ----------------------------------------------------------------------------------------
    def write(self, rows: Iterable[Row]) -> None:
        """Writes all rows or none, in one transaction; then deletes old rows beyond the bounds."""
        by_table: dict[StoreTable, list[tuple[Scalar, ...]]] = {}
        for table, values in rows:
            by_table.setdefault(table, []).append(self._to_row(table, values))
        if not by_table:
            return
        with self._transaction() as db:
            for table, table_rows in by_table.items():
                names = [name for name in COLUMNS[table] if name != "id"]
                columns, marks = ", ".join(f'"{name}"' for name in names), ", ".join("?" * len(names))
                db.executemany(f'INSERT INTO "{table}" ({columns}) VALUES ({marks})', table_rows)
                # Ids have no gaps, since only the oldest rows are ever deleted.
                db.execute(
                    f'DELETE FROM "{table}" WHERE id <= (SELECT max(id) FROM "{table}") - ?',
                    (self._limits.rows[table],),
                )
            if self._used_bytes(db) > self._limits.max_bytes:
                self._delete_old_rows(db)

    def _to_row(self, table: StoreTable, values: Mapping[str, Any]) -> tuple[Scalar, ...]:
        return tuple(self._scalar(values.get(name)) for name in COLUMNS[table] if name != "id")

    def _scalar(self, value: Any) -> Scalar:
        """A value as SQLite takes it, so that no value in a message makes a batch fail."""
        if value is None or isinstance(value, float):
            return value
        if isinstance(value, int) and -_INTEGER_BOUND <= value < _INTEGER_BOUND:
            return int(value)
        text = str(value).encode("utf-8", "replace").decode()
        most = self._limits.text_chars
        return text if len(text) <= most else text[: most - 1] + "…"

    def _delete_old_rows(self, db: sqlite3.Connection) -> None:
        """Deletes the oldest quarter of the first table that has rows, until enough space is free."""
        enough = self._limits.max_bytes * TARGET_SHARE
        for table in COLUMNS:
            while self._used_bytes(db) > enough:
                first, last = db.execute(f'SELECT min(id), max(id) FROM "{table}"').fetchone()
                if first is None:
                    break
                db.execute(f'DELETE FROM "{table}" WHERE id <= ?', (first + (last - first) // 4,))
        db.execute("PRAGMA incremental_vacuum").fetchall()  # gives the pages back to the file system

    def _used_bytes(self, db: sqlite3.Connection) -> int:
        pages, free, size = (
            int(db.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        assert self._writer is not None, "open it first"
        db = self._writer
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    # --- read -----------------------------------------------------------------------------------------
    def read(self, query: StoreQuery) -> QueryResult:
        """The rows that a query asks for, read through a connection that can't write.

        Raises:
            BadInput: The table has no such column.
        """
        all_columns = COLUMNS[query.table]
        for name in (*query.columns, *query.where):
            if name not in all_columns:
                names = ", ".join(all_columns)
                raise BadInput(f"{query.table} has no column {name[:80]!r}; there are: {names}")
        columns = query.columns or tuple(all_columns)
        conditions = ["id > ?"]
        values: list[Scalar] = [query.after_id]
        if query.since is not None:
            conditions.append("at >= ?")
            values.append(query.since)
        for name, value in query.where.items():
            conditions.append(f'"{name}" IS ?')  # `IS` also finds NULL
            values.append(self._scalar(value))
        selection = ", ".join(f'"{name}"' for name in ("id", *columns))
        order = "DESC" if query.newest else "ASC"
        condition = " AND ".join(conditions)
        sql = f'SELECT {selection} FROM "{query.table}" WHERE {condition} ORDER BY id {order} LIMIT ?'
        rows: list[tuple[Scalar, ...]] = []
        free_bytes, truncated = self._limits.answer_bytes, False
        with closing(self._read_only().execute(sql, (*values, query.limit + 1))) as cursor:
            for row in cursor:
                free_bytes -= sum(_size(value) for value in row)
                if len(rows) == query.limit or (free_bytes < 0 and rows):
                    truncated = True
                    break
                rows.append(tuple(_to_scalar(value) for value in row))
        if query.newest:
            rows.reverse()
        last_id = rows[-1][0] if rows else 0
        assert isinstance(last_id, int)
        return QueryResult(columns, tuple(row[1:] for row in rows), last_id, truncated)

    # --- open -----------------------------------------------------------------------------------------
    def _open(self) -> None:
        db = self._writer = sqlite3.connect(self.path, timeout=self._busy_s, isolation_level=None)
        db.text_factory = _decode
        version, application_id = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "application_id")
        )
        is_new = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if is_new:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has an effect only before the first table
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a power failure may cost the last commits, not the file
        db.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        db.execute(f"PRAGMA journal_size_limit = {LOG_PAGES * 4096}")
        db.execute("PRAGMA cache_size = -1024")  # KiB; the default is twice that, for each instance
        if is_new:
            with self._transaction():
                for statement in statements():
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            return
        if (application_id, version) != (APPLICATION_ID, SCHEMA_VERSION):
            is_store = application_id == APPLICATION_ID
            what = f"of schema {version}, not {SCHEMA_VERSION}" if is_store else "no local store"
            raise Unusable(f"the file is {what}")
        verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise Unusable(" ".join(str(verdict).split()))
        for table, columns in COLUMNS.items():
            present = [row[1] for row in db.execute(f'PRAGMA table_info("{table}")')]
            if present != list(columns):
                raise Unusable(f"table {table} has other columns than schema {SCHEMA_VERSION}")

    def _read_only(self) -> sqlite3.Connection:
        if self._reader is None:
            db = sqlite3.connect(
                self.path.absolute().as_uri() + "?mode=ro",
                uri=True,
                timeout=self._busy_s,
                isolation_level=None,
            )
            db.text_factory = _decode
            db.execute("PRAGMA query_only = ON")
            db.execute("PRAGMA cache_size = -256")
            self._reader = db
        return self._reader


def says_damage(error: Exception) -> bool:
    """Whether an error means that the file itself is damaged, and not its disk full or locked."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return isinstance(error, Unusable)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or (code & 0xFF) not in _PASSING


def _decode(data: bytes) -> str:
    """Decodes a text; bytes that are not UTF-8 are replaced."""
    return data.decode("utf-8", "replace")


def _to_scalar(value: Any) -> Scalar:
    if isinstance(value, bytes):
        return _decode(value)
    return None if isinstance(value, float) and math.isnan(value) else value


def _size(value: Any) -> int:
    """Upper bound of a value's bytes on the wire."""
    return 9 if value is None or isinstance(value, int | float) else 5 + len(value)
