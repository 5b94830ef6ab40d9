"""Read-only access to an instance's local store (draft §6.3), typed.

    store = InstanceStore(bus, job="job-1", sid="job-1-s0-r0")
    for event in await store.events(newest=True, limit=20):
        print(event.at, event.kind, event.text)

It is for users' own tools and modules. A `Policy` does not call it: it names its reads in `reads` and gets
the answers in `on_store_rows` (`policies.kit.policy`), so that `decide` stays pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from bus.connection import Bus
from bus.mesh.store_queries import query_store
from schemas.errors import NoResponders, NotFound
from schemas.store import Scalar, StoreQuery, StoreRows, StoreTable


@dataclass(frozen=True, slots=True)
class StoredRow:
    """The columns of every row: `id` grows with time, `at` is seconds since the epoch by the node's clock."""

    id: int
    at: float
    incarnation: str


@dataclass(frozen=True, slots=True)
class StoredMetrics(StoredRow):
    """A published sample; `links` and `device` are JSON (`LinkSample`, `DeviceSample`)."""

    step: int
    queue: int
    in_flight: int
    microbatches: int
    service_ms: float
    forward_ms: float
    backward_ms: float
    busy: float
    tokens_per_s: float
    reduce_ms: float
    retained_bytes: int
    resident_bytes: int
    links: str
    device: str | None


@dataclass(frozen=True, slots=True)
class StoredVersion(StoredRow):
    """An applied step."""

    version: int
    epoch: int
    attempt: int
    generation: int
    checksum: str
    action: str
    clip: float | None


@dataclass(frozen=True, slots=True)
class StoredEvent(StoredRow):
    """An event; `step` is None for events of the store itself."""

    kind: str
    step: int | None
    text: str


@dataclass(frozen=True, slots=True)
class StoredConfiguration(StoredRow):
    """One entry of an incarnation's start configuration; `value` is JSON."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class StoredSnapshot(StoredRow):
    """A checkpoint or an export that was written."""

    kind: str
    version: int
    epoch: int
    url: str
    name: str | None
    bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class StoredOrder(StoredRow):
    """An audited order; it stands for `count` orders if they were obeyed within one second."""

    sender: str
    sender_kind: str
    sender_incarnation: str
    what: str
    epoch: int | None
    step: int | None
    count: int
    outcome: str
    reason: str
    took_ms: float


Record = TypeVar("Record", bound=StoredRow)


class InstanceStore:
    """A read-only client of one instance's store.

    All methods take `where` (equalities by column), `after_id`, `since` (seconds since the epoch), `limit`
    (at most 1,000) and `newest` (the last rows instead of the first), and raise:
        NotFound: The instance does not exist; its store is removed with its job.
        BadInput: There is no such column.
        Refused: The instance belongs to another user's job.
        Unavailable: The instance does not answer, or keeps no store.
    """

    def __init__(self, bus: Bus, *, job: str, sid: str, timeout_s: float = 5.0, owner: str = "") -> None:
        """Make a reader of one instance's store.

        Args:
            bus: The caller's connection.
            job: The job.
            sid: The instance.
            timeout_s: Seconds that an answer may take; a thread of the instance gives it while training goes
                on.
            owner: The user for whose module it reads; empty: the caller reads in its own name.
        """
        self.job = job
        self.sid = sid
        self._bus = bus
        self._timeout_s = timeout_s
        self._owner = owner

    async def rows(
        self,
        table: StoreTable,
        *,
        columns: tuple[str, ...] = (),
        where: Mapping[str, Scalar] | None = None,
        after_id: int = 0,
        since: float | None = None,
        limit: int = 100,
        newest: bool = False,
    ) -> StoreRows:
        """Rows of any table; `truncated` in the answer tells whether there are more."""
        query = StoreQuery(
            job=self.job,
            table=table,
            columns=columns,
            where=dict(where or {}),
            after_id=after_id,
            since=since,
            limit=limit,
            newest=newest,
        )
        return await self.ask(query)

    async def ask(self, query: StoreQuery) -> StoreRows:
        """The answer to a prepared query."""
        try:
            return await query_store(
                self._bus, query, sid=self.sid, owner=self._owner, timeout_s=self._timeout_s
            )
        except NoResponders as error:
            raise NotFound(
                f"{self.sid} of {self.job} is not there: an instance answers while it lives, and its store "
                "goes with its job, unless its node was joined with --keep-stores",
                sid=self.sid,
            ) from error

    async def metrics(self, **narrow: Any) -> list[StoredMetrics]:
        """Samples, thinned to two a second."""
        return await self._records("metrics", StoredMetrics, narrow)

    async def versions(self, **narrow: Any) -> list[StoredVersion]:
        """Applied steps."""
        return await self._records("versions", StoredVersion, narrow)

    async def events(self, **narrow: Any) -> list[StoredEvent]:
        """States, recoveries, refusals, broken links, new routes."""
        return await self._records("events", StoredEvent, narrow)

    async def snapshots(self, **narrow: Any) -> list[StoredSnapshot]:
        """Checkpoints and exports."""
        return await self._records("snapshots", StoredSnapshot, narrow)

    async def audit(self, **narrow: Any) -> list[StoredOrder]:
        """Orders, obeyed or refused."""
        return await self._records("audit", StoredOrder, narrow)

    async def configuration(self) -> dict[str, Any]:
        """The start configuration of the present incarnation: job, unit, tags, dependencies, …"""
        rows = await self._records("configuration", StoredConfiguration, {"newest": True, "limit": 100})
        newest = rows[-1].incarnation if rows else ""
        return {row.key: json.loads(row.value) for row in rows if row.incarnation == newest}

    async def _records(
        self, table: StoreTable, record: type[Record], narrow: Mapping[str, Any]
    ) -> list[Record]:
        answer = await self.rows(table, **narrow)
        return [record(**row) for row in answer.records()]
