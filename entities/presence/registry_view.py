"""A copy of the registry, kept current by Type 2 (draft §4.3), so that calls go on while the SRD is away.

`RegistryView` is the pure part: it applies an advertisement or reports a gap.
`RegistryFollower` is the asyncio part: it listens, and requests a snapshot at start, on a gap, and after a
reconnect. Routers and gateways use it.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.discovery import resolve
from schemas.envelope import EntityKind, Envelope
from schemas.errors import DmscError
from schemas.registry import InstanceState, Resolve, Resolved, ServiceRecord
from schemas.signals import RouteAdvertisement

log = get_logger("registry-view")

GroupT = TypeVar("GroupT")


class _Members:
    """A subset of the records, kept in order of SID: a stage may have thousands, read at each change."""

    def __init__(self) -> None:
        self._sids: list[str] = []
        self._records: dict[str, ServiceRecord] = {}

    def __len__(self) -> int:
        return len(self._sids)

    def __iter__(self) -> Iterator[ServiceRecord]:
        return map(self._records.__getitem__, self._sids)

    def put(self, record: ServiceRecord) -> None:
        if record.sid not in self._records:
            bisect.insort(self._sids, record.sid)
        self._records[record.sid] = record

    def drop(self, sid: str) -> None:
        del self._records[sid]
        del self._sids[bisect.bisect_left(self._sids, sid)]


class RegistryView:
    """The records by SID, as of the registry's `revision`."""

    def __init__(self) -> None:
        self.revision = 0
        self.records: dict[str, ServiceRecord] = {}
        self._jobs: dict[str, dict[int | None, _Members]] = {}
        self._clusters: dict[str, _Members] = {}
        self._entities: dict[str, ServiceRecord] = {}

    def apply(self, advertisement: RouteAdvertisement) -> frozenset[str] | None:
        """Apply an advertisement; return the SIDs that changed, or None if there is a gap before it."""
        if advertisement.full:
            return self._replace(advertisement.revision, advertisement.changed)
        if advertisement.revision == self.revision and advertisement.previous < advertisement.revision:
            return frozenset()  # a duplicate
        if not advertisement.previous <= self.revision <= advertisement.revision:
            return None  # an advertisement was missed, or the registry was set up anew
        self.revision = advertisement.revision
        touched = {record.sid for record in advertisement.changed if self._put(record)}
        touched |= {sid for sid in advertisement.removed if self._drop(sid) is not None}
        return frozenset(touched)

    def snapshot(self, resolved: Resolved) -> frozenset[str]:
        """Take over the registry's answer to a `Resolve` without filters; return the SIDs that differ."""
        return self._replace(resolved.revision, resolved.records)

    def instances(
        self, *, job: str | None = None, stage: int | None = None, cluster: str | None = None
    ) -> tuple[ServiceRecord, ...]:
        """The records that belong to jobs and match every given filter, in order of SID.

        It reads only the records of the cluster if `cluster` is given, else only those of the job or stage.
        """
        if cluster is not None:
            return tuple(
                record
                for record in self._clusters.get(cluster, ())
                if (job is None or record.job == job) and (stage is None or record.stage == stage)
            )
        jobs = self._jobs.values() if job is None else (self._jobs.get(job, {}),)
        groups = [
            members
            for stages in jobs
            for number, members in stages.items()
            if stage is None or number == stage
        ]
        if len(groups) == 1:
            return tuple(groups[0])
        return tuple(sorted(chain.from_iterable(groups), key=lambda record: record.sid))

    def active(self, *, job: str, stage: int) -> tuple[ServiceRecord, ...]:
        """The active instances of one stage of a job, in order of SID."""
        return tuple(
            record for record in self.instances(job=job, stage=stage) if record.state is InstanceState.ACTIVE
        )

    def resolve(self, query: Resolve) -> tuple[ServiceRecord, ...]:
        """What the registry would answer this query with, in order of SID (draft §1)."""
        if query.job is None:
            records: Iterable[ServiceRecord] = (self.records[sid] for sid in sorted(self.records))
        else:
            records = self.instances(job=query.job, stage=query.stage)
        return tuple(record for record in records if query.matches(record))

    def clusters(self) -> frozenset[str]:
        """The clusters in which instances of jobs are."""
        return frozenset(self._clusters)

    def entities(self) -> tuple[ServiceRecord, ...]:
        """The records of the mesh's entities, other than node agents."""
        return tuple(self._entities.values())

    def _replace(self, revision: int, records: Iterable[ServiceRecord]) -> frozenset[str]:
        new_records = {record.sid: record for record in records}
        gone = self.records.keys() - new_records.keys()
        for sid in gone:
            self._drop(sid)
        self.revision = revision
        return frozenset(gone | {sid for sid, record in new_records.items() if self._put(record)})

    def _put(self, record: ServiceRecord) -> bool:
        """Store a record; return whether it differs from the present one."""
        before = self.records.get(record.sid)
        if before == record:
            return False
        if before is not None and _place(before) != _place(record):
            self._drop(record.sid)
        self.records[record.sid] = record
        if record.job is not None:
            self._jobs.setdefault(record.job, {}).setdefault(record.stage, _Members()).put(record)
            self._clusters.setdefault(record.endpoint.cluster, _Members()).put(record)
        elif record.kind is not EntityKind.CLUSTER:
            self._entities[record.sid] = record
        return True

    def _drop(self, sid: str) -> ServiceRecord | None:
        record = self.records.pop(sid, None)
        self._entities.pop(sid, None)
        if record is not None and record.job is not None:
            stages = self._jobs[record.job]
            _drop_from(stages, record.stage, sid)
            if not stages:
                del self._jobs[record.job]
            _drop_from(self._clusters, record.endpoint.cluster, sid)
        return record


def _place(record: ServiceRecord) -> tuple[str | None, int | None, str]:
    return record.job, record.stage, record.endpoint.cluster


def _drop_from(groups: dict[GroupT, _Members], group: GroupT, sid: str) -> None:
    members = groups[group]
    members.drop(sid)
    if not members:
        del groups[group]


@dataclass(frozen=True, kw_only=True)
class FollowConfig:
    """How a follower requests snapshots."""

    request_timeout_s: float = 2.0  # one page of records
    retry_s: float = 0.3  # pause before the next request while the registry is away
    buffered: int = 1024  # deltas kept while a snapshot is under way; beyond it another snapshot is needed


class RegistryFollower:
    """Keeps a `RegistryView` current. `on_change` is called with the SIDs that changed, in order."""

    def __init__(
        self,
        bus: Bus,
        on_change: Callable[[frozenset[str]], None] | None = None,
        config: FollowConfig | None = None,
    ) -> None:
        self.view = RegistryView()
        self.current = asyncio.Event()
        self.gaps = 0
        self.snapshots = 0
        self.informed = False
        """Whether the view was ever complete; before that, an empty view means nothing."""
        self._bus = bus
        self._on_change = on_change
        self._config = config or FollowConfig()
        self._behind = asyncio.Event()
        self._buffer: deque[RouteAdvertisement] = deque(maxlen=self._config.buffered)
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        """Listen until cancelled. `current` is set while the view follows the registry without a gap."""
        self._bus.on_reconnect(self._on_reconnect)
        subscription = await self._bus.subscribe(subjects.ADVERTISEMENT, self._on_advertisement)
        self._behind.set()
        try:
            while True:
                await self._behind.wait()
                await self._catch_up()
        finally:
            await subscription.stop(drain=False)

    async def wait_for(self, condition: Callable[[RegistryView], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds for the view; return False if `timeout_s` passes first."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: condition(self.view))
        except TimeoutError:
            return condition(self.view)
        return True

    async def _on_advertisement(self, message: RouteAdvertisement, envelope: Envelope) -> None:
        if self._behind.is_set() and not message.full:
            self._buffer.append(message)
            return
        touched = self.view.apply(message)
        if touched is None:
            self.gaps += 1
            log.info(
                "registry gap", held=self.view.revision, previous=message.previous, revision=message.revision
            )
            self._buffer.append(message)
            self._mark_behind()
            return
        if message.full:
            self.informed = True
            self._mark_current()
        await self._notify(touched)

    async def _catch_up(self) -> None:
        try:
            answer = await resolve(self._bus, Resolve(), timeout_s=self._config.request_timeout_s)
        except DmscError as error:
            log.debug("registry does not answer", code=error.code, error=error.text)
            await asyncio.sleep(self._config.retry_s)
            return
        if not self._behind.is_set() and answer.revision <= self.view.revision:
            return  # a full state overtook the answer
        touched = set(self.view.snapshot(answer))
        self.snapshots += 1
        self.informed = True
        self._behind.clear()
        buffer, self._buffer = list(self._buffer), deque(maxlen=self._config.buffered)
        for advertisement in buffer:
            if advertisement.revision <= self.view.revision:
                continue
            changes = self.view.apply(advertisement)
            if changes is None:
                self._mark_behind()
                break
            touched |= changes
        if not self._behind.is_set():
            self.current.set()
        await self._notify(frozenset(touched))

    def _mark_behind(self) -> None:
        self.current.clear()
        self._behind.set()

    def _mark_current(self) -> None:
        self.snapshots += 1  # a full advertisement is one
        self._buffer.clear()
        self._behind.clear()
        self.current.set()

    async def _notify(self, touched: frozenset[str]) -> None:
        if touched and self._on_change is not None:
            self._on_change(touched)
        async with self._changed:
            self._changed.notify_all()

    async def _on_reconnect(self) -> None:
        self._mark_behind()
