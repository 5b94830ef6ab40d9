"""The tables of a local store, version 1 (draft §6.1), and how many rows of each are kept.

Every table begins with `id` (always growing, never reused), `at` (seconds since the epoch, by this node's
clock) and `incarnation` (the writer's). Times are milliseconds, sizes bytes, unless a name says otherwise.
`docs/local-store.md` explains each column; a change here raises `SCHEMA_VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from schemas.errors import BadInput
from schemas.store import StoreTable

SCHEMA_VERSION: Final = 1
"""`PRAGMA user_version` of a store."""
APPLICATION_ID: Final = 0x444D5343
"""`PRAGMA application_id` of a store: "DMSC"."""

COMMON: Final = {"id": "INTEGER", "at": "REAL", "incarnation": "TEXT"}
"""The columns that every table begins with."""

_OWN: dict[StoreTable, dict[str, str]] = {
    "metrics": {  # samples as published, thinned
        "step": "INTEGER",
        "queue": "INTEGER",
        "in_flight": "INTEGER",
        "microbatches": "INTEGER",
        "service_ms": "REAL",
        "forward_ms": "REAL",
        "backward_ms": "REAL",
        "busy": "REAL",
        "tokens_per_s": "REAL",
        "reduce_ms": "REAL",
        "retained_bytes": "INTEGER",
        "resident_bytes": "INTEGER",
        "links": "TEXT",  # JSON, a list of LinkSample
        "device": "TEXT",  # JSON, a DeviceSample
    },
    "versions": {  # each applied step
        "version": "INTEGER",
        "epoch": "INTEGER",
        "attempt": "INTEGER",
        "generation": "INTEGER",
        "checksum": "TEXT",
        "action": "TEXT",
        "clip": "REAL",
    },
    "events": {
        "kind": "TEXT",
        "step": "INTEGER",
        "text": "TEXT",
    },
    "configuration": {
        "key": "TEXT",
        "value": "TEXT",  # JSON
    },
    "snapshots": {  # checkpoints and exports written on the orchestrator's order
        "kind": "TEXT",
        "version": "INTEGER",
        "epoch": "INTEGER",
        "url": "TEXT",
        "name": "TEXT",
        "bytes": "INTEGER",
        "sha256": "TEXT",
    },
    "audit": {  # each order, obeyed or refused
        "sender": "TEXT",
        "sender_kind": "TEXT",
        "sender_incarnation": "TEXT",
        "what": "TEXT",  # the row of the table of subjects
        "epoch": "INTEGER",
        "step": "INTEGER",
        "count": "INTEGER",
        "outcome": "TEXT",
        "reason": "TEXT",
        "took_ms": "REAL",
    },
}

COLUMNS: Final[Mapping[StoreTable, Mapping[str, str]]] = MappingProxyType(
    {table: MappingProxyType({**COMMON, **own}) for table, own in _OWN.items()}
)
"""Table → column → SQL type. When bytes run short, rows are deleted in the order of these tables."""

ROWS: Final[Mapping[StoreTable, int]] = MappingProxyType(
    {
        "metrics": 20_000,
        "versions": 50_000,
        "events": 10_000,
        "configuration": 1_000,
        "snapshots": 5_000,
        "audit": 50_000,
    }
)
"""Most rows kept of each table; the oldest are deleted first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLimits:
    """Bounds of one instance's store."""

    max_bytes: int = 32 << 20
    """Most bytes of the file. Beyond it the oldest metrics are deleted first, then versions, …, audit last
    (`COLUMNS`). The write-ahead log next to it takes up to a quarter of it more."""

    rows: Mapping[StoreTable, int] = field(default_factory=lambda: ROWS)
    """Most rows of each table."""

    text_chars: int = 32 << 10
    """Longest text; a longer one is cut and ends in `…`."""

    answer_bytes: int = 256 << 10
    """Most bytes of one answer's values; the bus takes 8 MiB, but other messages wait behind a large one."""

    def __post_init__(self) -> None:
        if self.max_bytes < 128 << 10 or min(self.rows.values()) < 1 or set(self.rows) != set(COLUMNS):
            raise BadInput("local store: max_bytes must be at least 131072, rows at least 1 for each table")


def statements() -> list[str]:
    """The SQL statements that create an empty store's tables."""
    sql = []
    for table, columns in COLUMNS.items():
        rest = ", ".join(f'"{name}" {kind}' for name, kind in columns.items() if name != "id")
        sql.append(f'CREATE TABLE IF NOT EXISTS "{table}" (id INTEGER PRIMARY KEY AUTOINCREMENT, {rest})')
    return sql
