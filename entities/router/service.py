"""SR, service router: one per cluster (draft §3, §4.3 Types 2, 4 and 5, §4.4).

It follows the registry (Type 2), keeps the orchestrator's policies (Type 5 down), and writes the weighted
route tables that its cluster's instances watch. It receives its cluster's samples, reports on them to the
gateways and the other routers (Type 4), aggregates them for the orchestrator (Type 5 up), and reports faults,
including slow instances.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from bus.messaging.handlers import Subscription
from bus.messaging.key_value import Watch
from entities.detection.fail_slow import FailSlow, FailSlowConfig
from entities.metrics import REFUSED_SAMPLES, ROUTE_CHANGES, MetricReading
from entities.presence.entity_record import entity_record
from entities.presence.instance_subscriptions import InstanceSubscriptions
from entities.presence.mesh_registration import keep_registered, registration_of
from entities.presence.registry_view import FollowConfig, RegistryFollower
from entities.presence.service_area import ServiceArea
from entities.qos.fault_reporter import FaultReporter, FaultReporterConfig, death_of
from entities.qos.policy_book import PolicyBook
from entities.qos.reporter import QosReporter
from entities.qos.window import QosWindow
from entities.router.compute_notification import compute_entries, is_news, stage_loads
from entities.router.core import (
    TableDecision,
    changed_stages,
    decide_table,
    member_of,
    route_entry,
    worth_writing,
)
from entities.router.link_statistics import LinkStatistics
from entities.router.load_statistics import LoadStatistics
from entities.router.memo import Memo
from entities.router.outlier_ejection import Ejection, EjectionConfig, InstanceHealth
from entities.router.route_table_store import RouteTables
from entities.router.samples import InstanceSamples, device_errors
from schemas.data_plane import RouteTable
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, DmscError
from schemas.fault import FaultReport, LinkFault
from schemas.registry import InstanceState, ServiceRecord
from schemas.signals import (
    CommunicationPolicy,
    ComputeEntry,
    ComputeNotification,
    StagePolicy,
)
from schemas.step import Member
from schemas.task_graph import ENTRY, is_data
from schemas.telemetry import InstanceSample

log = get_logger("router")

StageKey = tuple[str, int]  # job, stage


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Settings of one cluster's router."""

    cluster: str
    sid: str = ""  # default: router-<cluster>
    node: str = "mesh"
    compute_gap_s: float = 0.2  # at most 5 Type 4 messages a second, however many samples come
    compute_every_s: float = 5.0  # Type 4 without a change, for gateways that started later
    report_every_s: float = 1.0  # Type 5 while a job runs
    retry_s: float = 0.2  # pause before a failed write of a table is repeated
    turn_s: float = 0.002  # pause after the tables of a stage: everything else runs then
    energy_price: float | None = None  # of a kWh in any currency, for the metrics; None: unknown
    measured_s: float = 1.0  # least pause between tables of a stage that differ only in measurements
    fail_slow: FailSlowConfig = field(default_factory=FailSlowConfig)
    ejection: EjectionConfig = field(default_factory=EjectionConfig)
    follow: FollowConfig = field(default_factory=FollowConfig)
    faults: FaultReporterConfig = field(default_factory=FaultReporterConfig)

    def __post_init__(self) -> None:
        if not self.sid:
            object.__setattr__(self, "sid", f"router-{self.cluster}")
        if not 0 < self.compute_gap_s < self.compute_every_s:
            raise ValueError(
                f"compute_gap_s {self.compute_gap_s} must be above 0 "
                f"and below compute_every_s {self.compute_every_s}"
            )


class Router:
    """The router's service."""

    def __init__(self, bus: Bus, config: RouterConfig) -> None:
        self.config = config
        self.book = PolicyBook()
        self.follower = RegistryFollower(bus, self._registry_changed, config.follow)
        self._bus = bus
        self._area = ServiceArea(self.follower.view, EntityKind.ROUTER, config.cluster)
        self._tables = RouteTables(bus, config.cluster)
        self._table_lock = asyncio.Lock()
        self._place_of: dict[str, tuple[str, int | None, str]] = {}  # SID → job, stage, cluster
        # Stages to decide again, in order: instances changed; time has passed; a table's write failed.
        self._changed: dict[StageKey, None] = {}
        self._due: dict[StageKey, None] = {}
        self._failed: dict[StageKey, None] = {}
        self._route_memo, self._load_memo = Memo(route_entry), Memo(ComputeEntry)
        self._newly_measured: set[StageKey] = set()  # measured since the last decision
        self._tables_due = asyncio.Event()
        self._measured = LoadStatistics()
        self._links = LinkStatistics()
        self._samples = InstanceSamples(config.cluster, config.energy_price)
        self._route_changes: Counter[tuple[str, int]] = Counter()
        self._slow: dict[str, FailSlow] = {}
        self._ejections: dict[tuple[str, int], Ejection] = {}
        self._feed = InstanceSubscriptions(bus, subjects.INSTANCE_SAMPLE, self._on_sample)
        self._compute_due = asyncio.Event()
        self._qos = QosWindow()
        self._reporter = QosReporter(
            bus,
            sid=config.sid,
            cluster=config.cluster,
            book=self.book,
            window=self._qos,
            follower=self.follower,
            every_s=config.report_every_s,
            links=self._links.report,
            energy_j=self._samples.energy_j,
        )
        self._faults = FaultReporter(bus, config.faults)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until cancelled."""
        config = self.config
        subscriptions: list[Subscription | Watch] = []
        async with asyncio.TaskGroup() as tasks:
            try:
                subscriptions.append(await self._tables.guard(self._on_overwritten_table))
                subscriptions += [
                    await self._bus.serve(subjects.QOS_POLICY, self._on_policy, sid=config.sid),
                    await self._bus.subscribe(
                        subjects.LINK_FAULT, self._on_link_fault, cluster=config.cluster
                    ),
                    await self._bus.subscribe(
                        subjects.COMPUTE, self._on_compute, ignored=subjects.COMPUTE(cluster=config.cluster)
                    ),
                ]
                for work in (
                    self.follower.follow(),
                    self._faults.run(),
                    self._keep_tables(),
                    self._remeasure(),
                    self._feed.run(self._area.instances),
                    self._notify_compute(),
                    self._reporter.run(),
                    keep_registered(self._bus, registration_of(self._record(), "routing", "telemetry")),
                ):
                    tasks.create_task(work)
                async with RegistrationClient(self._bus, self._record()):
                    log.info("router ready", cluster=config.cluster)
                    if ready is not None:
                        ready.set()
                    await asyncio.get_running_loop().create_future()
            finally:
                for subscription in subscriptions:
                    await subscription.stop()
                await self._feed.stop()

    # --- Type 5 down: policy ---------------------------------------------------------------------------
    async def _on_policy(self, message: CommunicationPolicy, envelope: Envelope) -> Ack:
        before = self.book.active.get(message.job)
        outcome = self.book.take(message)
        log.info("policy", job=message.job, revision=message.revision, outcome=outcome, reason=message.reason)
        if outcome == "ended":
            await self._end(message.job)
        elif outcome == "adopted":
            await self._write_tables(message.job, changed_stages(before, message))
            self._compute_due.set()
        return Ack(note=outcome)

    async def _end(self, job: str) -> None:
        """Remove an ended job's tables and report that to SMO and SRD (draft §4.4(6))."""
        async with self._table_lock:
            await self._tables.remove(job)
            self._ejections = {key: value for key, value in self._ejections.items() if key[0] != job}
            self._slow.pop(job, None)
            self._samples.forget(job)
            for key in [key for key in self._route_changes if key[0] == job]:
                del self._route_changes[key]
        await self._reporter.end(job, "route tables removed")

    # --- Type 2 → route tables ---------------------------------------------------------------------------
    def _registry_changed(self, sids: frozenset[str]) -> None:
        records = self.follower.view.records
        places_changed = own_cluster = self._review_area()
        for sid in sids:
            record = records.get(sid)
            before = self._place_of.pop(sid, None)
            after = None
            if record is not None and record.job is not None:
                after = self._place_of[sid] = (record.job, record.stage, record.endpoint.cluster)
            places_changed = places_changed or after != before
            for job, stage, cluster in (place for place in (before, after) if place is not None):
                own_cluster = own_cluster or self._area.covers(cluster)
                if stage is not None:
                    self._changed[job, 0 if stage == ENTRY else stage] = None  # it has a share of the rate
            if record is None:
                self._measured.forget(sid)
                self._links.forget(sid)
                self._route_memo.forget(sid)
                self._load_memo.forget(sid)
                for fail_slow in self._slow.values():
                    fail_slow.forget(sid)
                continue
            if record.state is InstanceState.FAULTED and self._is_ours(record):
                self._report_faulted(record)
        self._tables_due.set()
        if places_changed:
            self._feed.refresh()
        if own_cluster:
            self._compute_due.set()

    def _review_area(self) -> bool:
        """Take on clusters without a router, and leave them to theirs again; return whether that changed."""
        if not (moved := self._area.review()):
            return False
        log.info("serves clusters without a router", guests=sorted(self._area.guests))
        for policy in self.book.active.values():
            self._changed |= {(policy.job, row.stage): None for row in policy.stages if row.stage != ENTRY}
        for cluster in moved & self._area.guests:  # what nobody reported
            for record in self.follower.view.instances(cluster=cluster):
                if record.state is InstanceState.FAULTED:
                    self._report_faulted(record)
        return True

    async def _keep_tables(self) -> None:
        """Write tables, one stage at a time, because a large job takes a while; changed stages come first."""
        while True:
            await self._tables_due.wait()
            self._tables_due.clear()
            while not self._failed and (waiting := self._changed or self._due):
                job, stage = key = next(iter(waiting))
                self._changed.pop(key, None)
                if key in self._due:
                    del self._due[key]
                    self._judge_latency(job, stage)
                await self._write_tables(job, frozenset({stage}))
                await asyncio.sleep(self.config.turn_s)  # a newer change may be more urgent
            if self._failed:
                await asyncio.sleep(self.config.retry_s)
                self._changed, self._failed = self._failed | self._changed, {}
                self._tables_due.set()

    async def _write_tables(self, job: str, only: frozenset[int] | None = None) -> None:
        """Decide and write the tables of a job's stages, or of the stages `only`."""
        if not self.follower.informed:
            return  # without any registry state no table may be emptied; the first full state calls again
        async with self._table_lock:
            policy = self.book.active.get(job)
            if policy is None:
                return
            now, memo = asyncio.get_running_loop().time(), self._route_memo
            stages = [
                row for row in policy.stages if row.stage != ENTRY and (only is None or row.stage in only)
            ]
            for number, stage in enumerate(stages):
                instances = self.follower.view.instances(job=job, stage=stage.stage)
                health = self._health(job, stage.stage, instances, now)
                guests, near = self._area.guests, policy.distances.get(self.config.cluster)
                senders = len(self.follower.view.active(job=job, stage=stage.stage - 1))
                decision = decide_table(
                    policy, stage, instances, self._measured, health, self._links, memo, guests, near, senders
                )
                try:
                    await self._write_table(policy, stage, decision, now)
                except DmscError as error:
                    log.warning("route table not written yet", job=job, code=error.code, error=error.text)
                    self._failed |= dict.fromkeys((job, stage.stage) for stage in stages[number:])
                    self._tables_due.set()
                    return

    async def _write_table(
        self, policy: CommunicationPolicy, stage: StagePolicy, decision: TableDecision, now: float
    ) -> None:
        last = await self._tables.known(policy.job, stage.stage)
        urgency = worth_writing(last.decision, decision)
        postponed = urgency == "measured" and now - last.at < self.config.measured_s
        if postponed:
            self._newly_measured.add((policy.job, stage.stage))
        if postponed or urgency == "no":
            return
        table = RouteTable(
            job=policy.job,
            cluster=self.config.cluster,
            stage=stage.stage,
            revision=last.revision + 1,
            router=self.config.sid,
            entries=decision.entries,
            algorithm=decision.algorithm,
            reason=f"{decision.reason}; {policy.reason}" if policy.reason else decision.reason,
            guests=decision.guests,
            admitted_per_s=decision.admitted_per_s,
        )
        await self._tables.write(table, decision, now)
        self._route_changes[policy.job, stage.stage] += 1
        log.info(
            "route table", job=policy.job, stage=stage.stage, revision=table.revision, reason=table.reason
        )

    async def _on_overwritten_table(self, key: str, revision: int) -> None:
        """Have a table written again whose value in the bucket can't be read."""
        stage = self._tables.overwritten(key, revision, self.book.active)
        if stage is not None:
            self._changed[stage] = None
            self._tables_due.set()

    async def _remeasure(self) -> None:
        """Decide tables again periodically: those with new measurements, ejections or returns."""
        while True:
            await asyncio.sleep(self.config.measured_s)
            measured, self._newly_measured = self._newly_measured, set()
            measured |= {key for key, ejection in self._ejections.items() if ejection.suspects}
            for policy in self.book.active.values():
                self._due |= dict.fromkeys(measured & {(policy.job, stage.stage) for stage in policy.stages})
            if self._due:
                self._tables_due.set()

    def _judge_latency(self, job: str, stage: int) -> None:
        """Count faults of far outliers in latency among a stage's instances of all clusters."""
        latencies: dict[Member, float] = {}
        for record in self.follower.view.active(job=job, stage=stage):
            figures = self._measured.of(record.sid, record.incarnation)
            if figures is not None:
                latencies[member_of(record)] = figures.latency_ms
        self._ejection(job, stage).measured(latencies, asyncio.get_running_loop().time())

    def _ejection(self, job: str, stage: int) -> Ejection:
        return self._ejections.setdefault((job, stage), Ejection(self.config.ejection))

    def _health(
        self, job: str, stage: int, instances: Iterable[ServiceRecord], now: float
    ) -> dict[Member, InstanceHealth]:
        if not self._ejection(job, stage).suspects:
            return {}
        active = [member_of(record) for record in instances if record.state is InstanceState.ACTIVE]
        return self._ejection(job, stage).health(active, now)

    # --- samples → Types 4 and 5 up ------------------------------------------------------------------------
    async def _on_sample(self, message: InstanceSample, envelope: Envelope) -> None:
        if self._measured.add(message):
            self._judge_speed(message)
        if (errors := device_errors(message.device)) is not None:
            evidence = f"{message.sid} on node {message.node}: {errors}"
            member = Member.of(message.sid, message.incarnation)
            self._report(member, job=message.job, kind="device", evidence=evidence, device=errors)
        self._links.add(message)
        # The next stage, too: the sample's links end there. Who makes batches asks the one before as well.
        near = range(message.stage - is_data(message.stage), message.stage + 2)
        self._newly_measured |= {(message.job, stage) for stage in near}
        self._samples.take(message)
        if message.job in self.book.active:
            self._qos.add_sample(message)
        self._compute_due.set()

    async def _notify_compute(self) -> None:
        revision = 0
        last_entries: tuple[ComputeEntry, ...] | None = None
        while True:
            periodic = False
            try:
                async with asyncio.timeout(self.config.compute_every_s):
                    await self._compute_due.wait()
            except TimeoutError:
                periodic = True
            self._compute_due.clear()
            entries = self._compute_entries()
            if periodic or is_news(last_entries, entries):
                revision += 1
                message = ComputeNotification(
                    router=self.config.sid,
                    cluster=self.config.cluster,
                    revision=revision,
                    entries=entries,
                    stages=stage_loads(entries, self.book.active),
                    guests=tuple(sorted(self._area.guests)),
                )
                try:
                    await self._bus.publish(subjects.COMPUTE, message, cluster=self.config.cluster)
                    last_entries = entries
                except DmscError as error:
                    log.info("type 4 not sent", code=error.code, error=error.text)
            await asyncio.sleep(self.config.compute_gap_s)

    def _compute_entries(self) -> tuple[ComputeEntry, ...]:
        now = asyncio.get_running_loop().time()
        weights: dict[Member, float] = {}
        for (job, stage), ejection in self._ejections.items():
            if not ejection.suspects:
                continue
            everyone = self.follower.view.instances(job=job, stage=stage)
            health = self._health(job, stage, everyone, now)
            weights.update((member, state.factor) for member, state in health.items())
        return compute_entries(
            self._area.instances(), self._measured, self.book.active, weights, self._load_memo
        )

    async def _on_compute(self, message: ComputeNotification, envelope: Envelope) -> None:
        """Take the figures of another cluster's router on its instances (draft §3: routers are linked)."""
        for entry in message.entries:
            record = self.follower.view.records.get(entry.sid)
            if record is None or entry.job not in self.book.active:
                continue
            place = record.endpoint.cluster
            if place == message.cluster or (place in message.guests and self._area.has_none(place)):
                self._measured.add_reported(entry)
                self._newly_measured.add((entry.job, entry.stage))

    def _judge_speed(self, sample: InstanceSample) -> None:
        if sample.job not in self.book.active or is_data(sample.stage) or sample.service_ms <= 0:
            return
        fail_slow = self._slow.setdefault(sample.job, FailSlow(self.config.fail_slow))
        done, work_ms = sample.microbatches, sample.stage_cost_ms
        verdict = fail_slow.observe(sample.sid, sample.incarnation, sample.service_ms, done, work_ms)
        if verdict is None:
            return
        log.warning("instance speed", sid=sample.sid, slow=verdict.slow, evidence=verdict.evidence)
        if verdict.slow:
            member = Member.of(sample.sid, sample.incarnation)
            self._report(member, job=sample.job, kind="slow", evidence=verdict.evidence)

    def readings(self) -> Iterator[MetricReading]:
        """The metrics of this router's cluster, by the last samples of its instances."""
        own_cluster = self.follower.view.instances(cluster=self.config.cluster)
        over = (InstanceState.FAULTED, InstanceState.GONE)
        yield from self._samples.readings({record.sid for record in own_cluster if record.state not in over})
        for (job, stage), count in self._route_changes.items():
            yield ROUTE_CHANGES(count, job=job, stage=str(stage), cluster=self.config.cluster)
        yield REFUSED_SAMPLES(self._measured.refused, cluster=self.config.cluster)

    # --- faults ------------------------------------------------------------------------------------------
    def _report_faulted(self, record: ServiceRecord) -> None:
        if record.stage == ENTRY:
            return  # the gateway reports those that it dispatches to
        self._faults.report(death_of(record, self.config.sid))

    async def _on_link_fault(self, message: LinkFault, envelope: Envelope) -> None:
        fault = "does not reach it" if message.unreachable else "lost its link to it"
        self._count_fault(message, fault)
        # a reporter without an incarnation may be fenced itself, so it is no valid witness
        witness = Member(sid=message.reporter, incarnation=message.reporter_incarnation or "unknown")
        self._report(
            Member.of(message.peer, message.peer_incarnation),
            job=message.job,
            kind="unreachable" if message.unreachable else "link",
            evidence=f"{message.reporter} {fault}: {message.text}",
            witness=witness,
            silent=message.silent,
        )

    def _report(self, member: Member, **fields: Any) -> None:
        """Report a fault of an instance to the orchestrator; `fields` are the report's others."""
        self._faults.report(
            FaultReport(reporter=self.config.sid, sid=member.sid, incarnation=member.incarnation, **fields)
        )

    def _count_fault(self, message: LinkFault, fault: str) -> None:
        """Count a link fault against the instance's health, for this cluster alone; SMO judges it itself."""
        record = self.follower.view.records.get(message.peer)
        if (
            record is None
            or record.incarnation != message.peer_incarnation
            or message.job not in self.book.active
        ):
            return
        if record.stage is None or record.stage == ENTRY:
            return
        now = asyncio.get_running_loop().time()
        ejection = self._ejection(message.job, record.stage)
        ejection.failed(member_of(record), f"{message.reporter} {fault}", now)
        self._changed[message.job, record.stage] = None
        self._tables_due.set()

    def _is_ours(self, record: ServiceRecord) -> bool:
        return record.kind is EntityKind.INSTANCE and self._area.covers(record.endpoint.cluster)

    # --- who we are ----------------------------------------------------------------------------------------
    def _record(self) -> ServiceRecord:
        config = self.config
        incarnation = self._bus.sender.incarnation
        return entity_record(
            EntityKind.ROUTER, config.sid, incarnation, node=config.node, cluster=config.cluster
        )
