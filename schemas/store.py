"""Reading an instance's local store over the bus (draft §6.3): a table, filters, a bound; never SQL."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from schemas.base import Message, Token
from schemas.step import Member

StoreTable = Literal["configuration", "metrics", "events", "versions", "snapshots", "audit"]
"""The tables of a local store; `docs/local-store.md` has their columns."""

Scalar = int | float | str | None
"""A value in a local store."""

MAX_ROWS = 1_000
"""Most rows of one answer."""


class StoreQuery(Message, wire="store.query"):
    """SMO, FM or client → MI: rows of one table, oldest first. Answered by `StoreRows`.

    Empty `columns` mean all of them. `where` has equalities, all of which must hold (None: the value is
    unknown). `after_id` and `since` (seconds since the epoch) exclude earlier rows. `newest` gives the last
    `limit` rows instead of the first.
    """

    job: Token
    table: StoreTable
    columns: tuple[str, ...] = Field((), max_length=64)
    where: dict[str, Scalar] = {}
    after_id: int = Field(0, ge=0, lt=1 << 63)
    since: float | None = Field(None, allow_inf_nan=False)
    limit: int = Field(100, ge=1, le=MAX_ROWS)
    newest: bool = False


class StoreRows(Message, wire="store.rows"):
    """MI → the requester: the rows, as tuples in the order of `columns`, oldest first.

    `truncated` means that more rows match than `limit` or the bound on bytes allows; request them with
    `after_id` = `last_id` (0: no row). `schema_version` is that of the store's tables.
    """

    member: Member
    table: StoreTable
    columns: tuple[str, ...]
    rows: tuple[tuple[Scalar, ...], ...]
    last_id: int = 0
    truncated: bool = False
    schema_version: int

    def records(self) -> list[dict[str, Any]]:
        """The rows as mappings from column to value."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]
