"""A holder's copy of the registry, kept current by Type 2 (draft §4.3): calls go on while the SRD is away.

`RegistryView` is the pure part: apply an advertisement, or say that there is a gap.
`RegistryFollower` is the asyncio part: it listens, and asks for a snapshot at start, on a gap, and
after a reconnect. Routers, gateways and the orchestrator use it.
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
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.registry import InstanceState, Resolve, Resolved, ServiceRecord
from schemas.signals import RouteAdvertisement

log = get_logger("registry-view")

GroupT = TypeVar("GroupT")


class _Members:
    """Some of the records, in order of SID: a stage may have thousands, and is read at each change."""

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
    """Records by SID, as of `revision` of the registry."""

    def __init__(self) -> None:
        self.revision = 0
        self.records: dict[str, ServiceRecord] = {}
        self._of_jobs: dict[str, dict[int | None, _Members]] = {}
        self._of_clusters: dict[str, _Members] = {}

    def apply(self, advertisement: RouteAdvertisement) -> frozenset[str] | None:
        """The SIDs that changed; None where this advertisement does not follow what we hold."""
        if advertisement.full:
            return self._replace(advertisement.revision, advertisement.changed)
        if advertisement.revision == self.revision and advertisement.previous < advertisement.revision:
            return frozenset()  # a duplicate
        if not advertisement.previous <= self.revision <= advertisement.revision:
            return None  # something in between was missed, or the registry was set up anew
        self.revision = advertisement.revision
        touched = {record.sid for record in advertisement.changed if self._put(record)}
        touched |= {sid for sid in advertisement.removed if self._drop(sid) is not None}
        return frozenset(touched)

    def snapshot(self, resolved: Resolved) -> frozenset[str]:
        """Take over the registry's answer to a `Resolve` without filters; the SIDs that differ."""
        return self._replace(resolved.revision, resolved.records)

    def instances(
        self, *, job: str | None = None, stage: int | None = None, cluster: str | None = None
    ) -> tuple[ServiceRecord, ...]:
        """Records that belong to jobs, in order of SID. Looks at those of the cluster, or of the job, or of
        its stage, alone."""
        if cluster is not None:
            return tuple(
                record
                for record in self._of_clusters.get(cluster, ())
                if (job is None or record.job == job) and (stage is None or record.stage == stage)
            )
        jobs = self._of_jobs.values() if job is None else (self._of_jobs.get(job, {}),)
        held = [
            members
            for stages in jobs
            for number, members in stages.items()
            if stage is None or number == stage
        ]
        if len(held) == 1:
            return tuple(held[0])
        return tuple(sorted(chain.from_iterable(held), key=lambda record: record.sid))

    def active(self, *, job: str, stage: int) -> tuple[ServiceRecord, ...]:
        """The active instances of one stage of a job, in order of SID."""
        return tuple(
            record for record in self.instances(job=job, stage=stage) if record.state is InstanceState.ACTIVE
        )

    def _replace(self, revision: int, records: Iterable[ServiceRecord]) -> frozenset[str]:
        fresh = {record.sid: record for record in records}
        gone = self.records.keys() - fresh.keys()
        for sid in gone:
            self._drop(sid)
        self.revision = revision
        return frozenset(gone | {sid for sid, record in fresh.items() if self._put(record)})

    def _put(self, record: ServiceRecord) -> bool:
        """Whether it is news."""
        before = self.records.get(record.sid)
        if before == record:
            return False
        if before is not None and _place(before) != _place(record):
            self._drop(record.sid)
        self.records[record.sid] = record
        if record.job is not None:
            self._of_jobs.setdefault(record.job, {}).setdefault(record.stage, _Members()).put(record)
            self._of_clusters.setdefault(record.endpoint.cluster, _Members()).put(record)
        return True

    def _drop(self, sid: str) -> ServiceRecord | None:
        record = self.records.pop(sid, None)
        if record is not None and record.job is not None:
            stages = self._of_jobs[record.job]
            _drop_from(stages, record.stage, sid)
            if not stages:
                del self._of_jobs[record.job]
            _drop_from(self._of_clusters, record.endpoint.cluster, sid)
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
    """How a holder asks for snapshots."""

    request_timeout_s: float = 2.0  # one page of records
    retry_s: float = 0.3  # pause before asking again while the registry is away
    buffered: int = 1024  # deltas kept while a snapshot is under way; more cost another snapshot


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
        """Whether the view was ever complete: before that, an empty view says nothing."""
        self._bus = bus
        self._on_change = on_change
        self._config = config or FollowConfig()
        self._behind = asyncio.Event()
        self._early: deque[RouteAdvertisement] = deque(maxlen=self._config.buffered)
        self._turned = asyncio.Condition()

    async def follow(self) -> None:
        """Listen until cancelled. `current` is set while the view follows the registry without a gap."""
        self._bus.on_reconnect(self._reconnected)
        subscription = await self._bus.subscribe(subjects.ADVERTISEMENT, self._heard)
        self._behind.set()
        try:
            while True:
                await self._behind.wait()
                await self._catch_up()
        finally:
            await subscription.stop(drain=False)

    async def wait_for(self, condition: Callable[[RegistryView], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds in the view; False once `timeout_s` has passed."""
        try:
            async with asyncio.timeout(timeout_s), self._turned:
                await self._turned.wait_for(lambda: condition(self.view))
        except TimeoutError:
            return condition(self.view)
        return True

    async def _heard(self, message: RouteAdvertisement, envelope: Envelope) -> None:
        if self._behind.is_set() and not message.full:
            self._early.append(message)
            return
        touched = self.view.apply(message)
        if touched is None:
            self.gaps += 1
            log.info(
                "registry gap", held=self.view.revision, previous=message.previous, revision=message.revision
            )
            self._early.append(message)
            self._fall_behind()
            return
        if message.full:
            self.informed = True
            self._caught_up()
        await self._tell(touched)

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
        early, self._early = list(self._early), deque(maxlen=self._config.buffered)
        for advertisement in early:
            if advertisement.revision <= self.view.revision:
                continue
            more = self.view.apply(advertisement)
            if more is None:
                self._fall_behind()
                break
            touched |= more
        if not self._behind.is_set():
            self.current.set()
        await self._tell(frozenset(touched))

    def _fall_behind(self) -> None:
        self.current.clear()
        self._behind.set()

    def _caught_up(self) -> None:
        self.snapshots += 1  # a full advertisement is one
        self._early.clear()
        self._behind.clear()
        self.current.set()

    async def _tell(self, touched: frozenset[str]) -> None:
        if touched and self._on_change is not None:
            self._on_change(touched)
        async with self._turned:
            self._turned.notify_all()

    async def _reconnected(self) -> None:
        self._fall_behind()
