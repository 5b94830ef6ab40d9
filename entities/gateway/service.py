"""MG, microservice gateway: one per cluster (draft §3, §4.3 Types 3, 4 and 5, §4.4).

The unified entry: requests at the NATS door and, where a port is set, over HTTP, each checked by Type 3;
a step's microbatches to the data instances; cluster-local aggregation for the orchestrator (Type 5 up);
faults of its data instances. It follows the registry (Type 2) and the routers (Type 4).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from bus.messaging.handlers import Subscription
from entities.gateway.dispatch.dispatcher import DATA_STAGE, Dispatcher, DispatcherConfig
from entities.gateway.http.config import HttpConfig
from entities.gateway.operations.access_client import AccessClient, AccessClientConfig
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.idempotency import IdempotencyStore
from entities.gateway.operations.job_view import JobCache
from entities.gateway.operations.jobs import JobOperations
from entities.http_server.connection_limits import OpenConnections
from entities.metrics import MetricReading, Render
from entities.presence.instance_subscriptions import InstanceSubscriptions
from entities.presence.mesh_registration import keep_registered
from entities.presence.registry_view import FollowConfig, RegistryFollower
from entities.qos.fault_reporter import FaultReporter, FaultReporterConfig, death_of
from entities.qos.policy_book import PolicyBook
from entities.qos.reporter import QosReporter
from entities.qos.window import QosWindow
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from schemas.signals import (
    CommunicationPolicy,
    ComputeEntry,
    ComputeNotification,
    NodeRegistration,
)
from schemas.step import MicrobatchClaim
from schemas.telemetry import InstanceSample

if TYPE_CHECKING:
    from entities.gateway.dashboard import Dashboard
    from entities.gateway.http.admission.load import HttpLoad
    from entities.gateway.http.metrics import HttpMetrics
    from entities.gateway.http.sse.hub import EventHub

log = get_logger("gateway")

QUEUE_GROUP = "gateway"


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Settings of one cluster's gateway."""

    cluster: str
    sid: str = ""  # default: gateway-<cluster>
    node: str = "mesh"
    http_port: int | None = None  # None: no HTTP door; 0: any free port
    http_host: str = "127.0.0.1"  # 0.0.0.0 opens it to other machines; tokens then need TLS in front
    tls: tuple[Path, Path] | None = None  # the HTTP door's certificate and key; None: plain HTTP
    proxies: tuple[str, ...] = ()  # addresses or networks whose X-Forwarded-For counts
    advertised_host: str = ""  # the name others reach it by, where http_host names none
    report_every_s: float = 1.0  # Type 5 while a job runs
    compute_valid_s: float = 15.0  # a Type 4 older than this counts for nothing: 3 × the routers' 5 s
    guard: AccessClientConfig = field(default_factory=AccessClientConfig)
    dispatch: DispatcherConfig = field(default_factory=DispatcherConfig)
    follow: FollowConfig = field(default_factory=FollowConfig)
    faults: FaultReporterConfig = field(default_factory=FaultReporterConfig)
    door: HttpConfig = field(default_factory=HttpConfig)

    def __post_init__(self) -> None:
        if not self.sid:
            object.__setattr__(self, "sid", f"gateway-{self.cluster}")
        if self.http_port is not None and not 0 <= self.http_port <= 65_535:
            raise ValueError(f"http_port is {self.http_port}; it must be 0 to 65535")


class Gateway:
    """The gateway's service. `url` is its HTTP door's, once `run` is ready.

    `exposition` makes the metrics of this process, for `/metrics` there; whoever runs it hands that in.
    """

    def __init__(self, bus: Bus, config: GatewayConfig) -> None:
        self.config = config
        self.url: str | None = None
        self.exposition: Render | None = None
        self._metrics: HttpMetrics | None = None
        self.dashboard: Dashboard | None = None
        self.book = PolicyBook()
        self.follower = RegistryFollower(bus, self._registry_changed, config.follow)
        self.backends = Backends(bus, config.sid)
        guard = AccessClient(self.backends, config.sid, config.guard)
        registry = self.follower
        self._kept = IdempotencyStore(bus, lambda: registry.view.records if registry.informed else None)
        self.desk = JobOperations(bus, self.backends, config.sid, guard, self._last_compute, self._kept)
        self._bus = bus
        self._hub: EventHub | None = None
        self._load: HttpLoad | None = None
        self._connections: OpenConnections | None = None
        self._compute: dict[str, tuple[float, tuple[ComputeEntry, ...]]] = {}
        self._faults = FaultReporter(bus, config.faults)
        self._qos = QosWindow()
        self._reporter = QosReporter(
            bus,
            sid=config.sid,
            cluster=config.cluster,
            book=self.book,
            window=self._qos,
            follower=self.follower,
            every_s=config.report_every_s,
        )
        self._claims = InstanceSubscriptions(bus, subjects.STEP_CLAIM, self._claimed)
        self._samples = InstanceSubscriptions(bus, subjects.INSTANCE_SAMPLE, self._sampled)
        self._dispatcher = Dispatcher(
            bus, config.sid, self.follower, self._last_compute, self._faults, self._qos, config.dispatch
        )

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until cancelled. Raises `BadInput` with one line where the HTTP port can't be had."""
        config = self.config
        subscriptions: list[Subscription] = []
        async with self.desk.guard.following(self._bus), self._http(), asyncio.TaskGroup() as tasks:
            try:
                subscriptions += [
                    await self._bus.serve(subjects.QOS_POLICY, self._policy, sid=config.sid),
                    await self._bus.serve(subjects.STEP_BEGIN, self._dispatcher.begin, gateway=config.sid),
                    await self._bus.serve(subjects.DOOR, self.desk.answer, queue_group=QUEUE_GROUP),
                    await self._bus.subscribe(subjects.COMPUTE, self._computed),
                ]
                for work in (
                    self.follower.follow(),
                    self._faults.run(),
                    self._claims.run(self._ours),
                    self._samples.run(self._our_data),
                    self._reporter.run(),
                    keep_registered(self._bus, self._registration()),
                ):
                    tasks.create_task(work)
                async with RegistrationClient(self._bus, self._record()):
                    log.info("gateway ready", cluster=config.cluster, url=self.url)
                    if ready is not None:
                        ready.set()
                    await asyncio.get_running_loop().create_future()
            finally:
                for subscription in subscriptions:
                    await subscription.stop()
                await self._claims.stop()
                await self._samples.stop()

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[None]:
        if self.config.http_port is None:
            yield
            return
        # Only here: FastAPI costs memory that a gateway without an outer door need not have.
        from entities.gateway.dashboard import Dashboard
        from entities.gateway.http.admission.deadlines import with_deadlines
        from entities.gateway.http.admission.early_refusal import refusing_early
        from entities.gateway.http.admission.listener import bind, configured, serving, url_of
        from entities.gateway.http.admission.load import HttpLoad
        from entities.gateway.http.admission.response_cache import ResponseCache
        from entities.gateway.http.app import build_http
        from entities.gateway.http.context import HttpContext
        from entities.gateway.http.metrics import HttpMetrics
        from entities.gateway.http.readiness import ReadinessProbe
        from entities.gateway.http.sse.hub import EventHub
        from entities.gateway.operations.modules import PolicyVersionOperations

        sock = bind(self.config.http_host, self.config.http_port)
        config, registry = self.config.door, self.follower
        self._metrics = HttpMetrics(
            self.config.sid, lambda: self.exposition, lambda: registry.view.records.values()
        )
        hub = self._hub = EventHub(self._bus, self.config.sid, config.events)
        load = self._load = HttpLoad(config)
        room = self._connections = OpenConnections(config)
        view = self.desk.view = JobCache(self._bus)
        probe = ReadinessProbe(self._bus, self.follower)
        dashboard = self.dashboard = Dashboard(
            self._bus, self.desk.guard, self.config.sid, lambda: registry.view.records.values()
        )
        door = HttpContext(
            bus=self._bus,
            desk=self.desk,
            promotions=PolicyVersionOperations(self.backends, self.desk.guard),
            backends=self.backends,
            follower=self.follower,
            hub=hub,
            kept=self._kept,
            load=load,
            reads=ResponseCache(),
            probe=probe,
            metrics=self._metrics,
            dashboard=dashboard,
            config=config,
        )

        async def drain() -> None:
            """Nothing new, streams told that they end here, and what is open answered: up to `drain_s`."""
            load.draining = probe.draining = True
            hub.drain()
            await dashboard.close()
            await load.drained(config.drain_s)

        protocol = "http" if self.config.tls is None else "https"
        served = configured(build_http(door), self.config.tls, self.config.proxies)
        served.http_protocol_class = refusing_early(
            with_deadlines(served.http_protocol_class, room), load, door.metrics.refused
        )
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(view.run())
            try:
                async with serving(served, sock, drain, room):
                    self.url = url_of(sock, self.config.http_host, self.config.advertised_host, protocol)
                    yield
            finally:
                watching.cancel()

    # --- Type 2 and Type 4: what we know ------------------------------------------------------------------
    def _registry_changed(self, sids: frozenset[str]) -> None:
        for sid in sids:
            record = self.follower.view.records.get(sid)
            if record is not None and record.state is InstanceState.FAULTED and self._is_our_data(record):
                self._faults.report(death_of(record, self.config.sid))
        self._claims.refresh()
        self._samples.refresh()

    async def _computed(self, message: ComputeNotification, envelope: Envelope) -> None:
        self._compute[message.cluster] = (asyncio.get_running_loop().time(), message.entries)

    def _last_compute(self) -> Mapping[str, tuple[ComputeEntry, ...]]:
        """Each cluster's last Type 4; a router that fell silent says nothing about the present."""
        oldest = asyncio.get_running_loop().time() - self.config.compute_valid_s
        return {cluster: entries for cluster, (at, entries) in self._compute.items() if at >= oldest}

    def _is_our_data(self, record: ServiceRecord) -> bool:
        return record.stage == DATA_STAGE and record.endpoint.cluster == self.config.cluster

    # --- Type 5 --------------------------------------------------------------------------------------------
    async def _policy(self, message: CommunicationPolicy, envelope: Envelope) -> Ack:
        outcome = self.book.take(message)
        log.info("policy", job=message.job, revision=message.revision, outcome=outcome, reason=message.reason)
        if outcome == "ended":
            self._dispatcher.forget(message.job)
            await self._reporter.end(message.job, "entry closed")
        return Ack(note=outcome)

    def _ours(self) -> tuple[ServiceRecord, ...]:
        return self.follower.view.instances(cluster=self.config.cluster)

    def _our_data(self) -> tuple[ServiceRecord, ...]:
        return tuple(record for record in self._ours() if record.stage == DATA_STAGE)

    async def _claimed(self, message: MicrobatchClaim, envelope: Envelope) -> None:
        if message.job in self.book.active and not message.evaluate:
            self._qos.add_microbatch(message.job)

    async def _sampled(self, message: InstanceSample, envelope: Envelope) -> None:
        if message.job in self.book.active:
            self._qos.add_sample(message)

    def readings(self) -> Iterable[MetricReading]:
        """For whoever scrapes this process."""
        if self._metrics is None or self._hub is None or self._load is None or self._connections is None:
            return self.backends.readings()
        return chain(
            self._metrics.readings(),
            self._load.readings(self.config.sid),
            self._connections.readings(self.config.sid),
            self._hub.readings(),
            self.backends.readings(),
        )

    # --- who we are -----------------------------------------------------------------------------------
    def _record(self) -> ServiceRecord:
        return ServiceRecord(
            sid=self.config.sid,
            prefix=f"entity/gateway/{self.config.cluster}",
            kind=EntityKind.GATEWAY,
            incarnation=self._bus.sender.incarnation,
            state=InstanceState.ACTIVE,
            endpoint=Endpoint(cluster=self.config.cluster, node=self.config.node, address=self.url or ""),
        )

    def _registration(self) -> NodeRegistration:
        return NodeRegistration(
            sid=self.config.sid,
            kind=EntityKind.GATEWAY,
            incarnation=self._bus.sender.incarnation,
            endpoint=Endpoint(cluster=self.config.cluster, node=self.config.node, address=self.url or ""),
            services=("entry", "aggregation", "door") + (("http",) if self.url else ()),
        )
