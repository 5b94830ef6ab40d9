"""MG, microservice gateway: one per cluster (draft §3, §4.3 Types 3, 4 and 5, §4.4).

The gateway answers requests over NATS and, where a port is set, over HTTP; each one is checked by Type 3.
It hands a step's microbatches to the data instances, aggregates its cluster's quality of service for the
orchestrator (Type 5, upwards), and reports faults of its data instances.
It follows the registry (Type 2) and the routers (Type 4).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from bus import subjects
from bus.connection import Bus
from bus.files.artifacts import ReadableArtifacts
from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from bus.messaging.handlers import Subscription
from entities.gateway.accounts.operations import AccountOperations
from entities.gateway.accounts.use_reports import UseReports
from entities.gateway.array_operations import ArrayOperations
from entities.gateway.backflow.operations import BackflowConfig, BackflowOperations, MeshKnowledge
from entities.gateway.batches.batch_log import BatchLog
from entities.gateway.batches.batch_runner import BatchConfig, BatchRunner
from entities.gateway.batches.file_store import FileStore
from entities.gateway.batches.operations import BatchOperations
from entities.gateway.batches.unit_work import UnitWork
from entities.gateway.calls.aggregated import AggregatedCalls, AggregationConfig
from entities.gateway.calls.calls import WholeCalls
from entities.gateway.data_sets.operations import DataSetOperations
from entities.gateway.data_sets.resolution import resolved
from entities.gateway.dispatch.dispatcher import Dispatcher, DispatcherConfig
from entities.gateway.figures.figures_publisher import FiguresConfig, FiguresPublisher
from entities.gateway.figures.service_counter import ServiceCounter
from entities.gateway.generation.operations import GenerationConfig, GenerationOperations
from entities.gateway.generation.prompts import Prompts
from entities.gateway.generation.service_book import ServiceBook
from entities.gateway.generation.session_keeper import KeeperConfig, SessionKeeper
from entities.gateway.generation.tokenizer_reading import OpenTokenizer, TokenizerReader, open_bytes
from entities.gateway.http.config import HttpConfig
from entities.gateway.models.operations import ModelOperations
from entities.gateway.models.resolution import with_models
from entities.gateway.nats_door import NatsDoor
from entities.gateway.operations.access_client import AccessClient, AccessClientConfig
from entities.gateway.operations.backends import Backends
from entities.gateway.operations.idempotency import IdempotencyStore
from entities.gateway.operations.jobs import JobOperations
from entities.http_server.connection_limits import OpenConnections
from entities.job_files.node_files import agents_of, files_of
from entities.metrics import MetricReading, Render
from entities.model_records.model_follower import ModelFollower
from entities.presence.entity_record import entity_record
from entities.presence.instance_subscriptions import InstanceSubscriptions
from entities.presence.mesh_registration import keep_registered, registration_of
from entities.presence.registry_view import FollowConfig, RegistryFollower
from entities.presence.service_area import ServiceArea, serving_clusters
from entities.qos.fault_reporter import FaultReporter, FaultReporterConfig, death_of
from entities.qos.policy_book import PolicyBook
from entities.qos.reporter import QosReporter
from entities.qos.window import QosWindow
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack
from schemas.registry import InstanceState, ServiceRecord
from schemas.signals import (
    CommunicationPolicy,
    ComputeEntry,
    ComputeNotification,
    NodeRegistration,
)
from schemas.step import MicrobatchClaim
from schemas.task_graph import ENTRY
from schemas.telemetry import InstanceSample

if TYPE_CHECKING:
    from entities.gateway.http.context import HttpContext

log = get_logger("gateway")

QUEUE_GROUP = "gateway"


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Settings of one cluster's gateway."""

    cluster: str
    sid: str = ""  # default: gateway-<cluster>
    node: str = "mesh"
    http_port: int | None = None  # None: no HTTP API; 0: any free port
    http_host: str = "127.0.0.1"  # 0.0.0.0 opens it to other machines; tokens then need TLS in front
    tls: tuple[Path, Path] | None = None  # certificate and key of the HTTP API; None: plain HTTP
    proxies: tuple[str, ...] = ()  # addresses or networks whose X-Forwarded-For is trusted
    advertised_host: str = ""  # the host name for others, where http_host names no single machine
    report_every_s: float = 1.0  # between two Type 5 reports while a job runs
    compute_valid_s: float = 15.0  # an older Type 4 is ignored: 3 × the routers' 5 s
    guard: AccessClientConfig = field(default_factory=AccessClientConfig)
    dispatch: DispatcherConfig = field(default_factory=DispatcherConfig)
    follow: FollowConfig = field(default_factory=FollowConfig)
    faults: FaultReporterConfig = field(default_factory=FaultReporterConfig)
    door: HttpConfig = field(default_factory=HttpConfig)
    sessions: KeeperConfig = field(default_factory=KeeperConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    aggregation: AggregationConfig = field(default_factory=AggregationConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    backflow: BackflowConfig = field(default_factory=BackflowConfig)
    account_every_s: float = 5.0  # between two reports of who was answered; what a killed gateway may lose
    figures: FiguresConfig = field(default_factory=FiguresConfig)
    open_tokenizer: OpenTokenizer = open_bytes  # with libraries that the control plane itself has not

    def __post_init__(self) -> None:
        if not self.sid:
            object.__setattr__(self, "sid", f"gateway-{self.cluster}")
        if self.http_port is not None and not 0 <= self.http_port <= 65_535:
            raise ValueError(f"http_port is {self.http_port}; it must be 0 to 65535")


class Gateway:
    """The gateway's service. `url` is the address of its HTTP API, and `http` its parts, once `run` is ready.

    `exposition` renders the metrics of this process for `/metrics`; the code that runs the gateway sets it.
    """

    def __init__(self, bus: Bus, config: GatewayConfig) -> None:
        self.config = config
        self.url: str | None = None
        self.exposition: Render | None = None
        self.http: HttpContext | None = None
        self.book = PolicyBook()
        self.follower = RegistryFollower(bus, self._registry_changed, config.follow)
        self.backends = Backends(bus, config.sid)
        access_client = AccessClient(self.backends, config.sid, config.guard)
        registry = self.follower
        self._idempotency = IdempotencyStore(
            bus, lambda: registry.view.records if registry.informed else None
        )
        self.jobs = JobOperations(bus, self.backends, config.sid, access_client, self._last_compute)
        self.arrays = ArrayOperations(self.jobs, self.backends)
        self.nats_door = NatsDoor(bus, self.jobs, self.arrays, self._idempotency)
        self.data_sets = DataSetOperations(bus, self.backends, self.jobs)
        self.jobs.resolve = partial(resolved, self.data_sets)
        book = ServiceBook(bus)
        self._keeper = SessionKeeper(
            bus, config.sid, registry.view, book.stages_of, book.is_whole, config.sessions
        )
        reader = TokenizerReader(self._files, config.open_tokenizer)
        prompts = Prompts(self.jobs.cache.get, reader.read)
        self.generations = GenerationOperations(
            bus, config.sid, book, self._keeper, prompts, config.generation
        )
        several = AggregatedCalls(self.generations, config.aggregation)
        self.calls = WholeCalls(self.generations, several)
        batches, files = BatchLog(bus), FileStore(bus, self.jobs.stored.uploads, config.door.upload_hold_s)
        self.batches = BatchOperations(bus, batches, files, config.door.max_file_bytes)
        self._batch_runner = BatchRunner(
            bus,
            batches,
            files,
            UnitWork(bus, self.calls, files, config.batches.lines),
            lambda: registry.view.records if registry.informed else None,
            lambda record: access_client.revoked(
                record.user, record.token_id, record.issued_at, expires=record.token_expires
            ),
            config.batches,
        )
        self._uses = UseReports(bus, config.sid, config.account_every_s)
        self._keeper.observers.append(self._uses.session)
        self.generations.passes.on_prediction = self._uses.predicted
        counter = ServiceCounter(
            self._keeper.ports.loads, lambda job: (each.sid for each in registry.view.instances(job=job))
        )
        self._keeper.observers.append(counter.session)
        self.generations.passes.counted = counter.prediction
        self._figures = FiguresPublisher(bus, config.sid, counter, book.living, config.figures)
        self._models = ModelFollower(bus)
        cache, models = self.jobs.cache, self._models.index
        self.backflow = BackflowOperations(
            bus,
            MeshKnowledge(
                services=lambda: book.services, job=cache.get, jobs=cache.all, models=lambda: models
            ),
            config.backflow,
        )
        self.generations.keeping = self.backflow.keeping
        self.models = ModelOperations(self._models, self.backends, self.jobs)
        self.jobs.with_models = partial(with_models, self.models)
        self._bus = bus
        self._area = ServiceArea(registry.view, EntityKind.GATEWAY, config.cluster)
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
        self._claims = InstanceSubscriptions(bus, subjects.STEP_CLAIM, self._on_claim)
        self._samples = InstanceSubscriptions(bus, subjects.INSTANCE_SAMPLE, self._on_sample)
        self._dispatcher = Dispatcher(
            bus,
            config.sid,
            self.follower,
            self.book,
            self._last_compute,
            self._faults,
            self._qos,
            config.dispatch,
        )

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serves until cancelled. Raises `BadInput` with one line where the HTTP port can't be bound."""
        config = self.config
        subscriptions: list[Subscription] = []
        async with self.jobs.access.following(self._bus), self._http(), asyncio.TaskGroup() as tasks:
            try:
                subscriptions += [
                    await self._bus.serve(subjects.QOS_POLICY, self._on_policy, sid=config.sid),
                    await self._bus.serve(subjects.STEP_BEGIN, self._dispatcher.begin, gateway=config.sid),
                    await self._bus.serve(subjects.DOOR, self.nats_door.answer, queue_group=QUEUE_GROUP),
                    await self._bus.subscribe(subjects.COMPUTE, self._on_compute),
                ]
                for work in (
                    self.follower.follow(),
                    self.jobs.cache.run(),
                    self.generations.book.run(),
                    self.generations.outcomes.run(),
                    self._keeper.run(),
                    self.backflow.run(),
                    self._batch_runner.run(),
                    self._uses.run(),
                    self._figures.run(),
                    self._models.run(),
                    self._faults.run(),
                    self._claims.run(self._area.instances),
                    self._samples.run(self._data_instances),
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

    def _files(self, url: str) -> ReadableArtifacts:
        """The files below a URL that a job names; this process opens none but those on the bus."""
        return files_of(url, self._bus, lambda: agents_of(self.follower.view.records))

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[None]:
        if self.config.http_port is None:
            yield
            return
        # Imported only here: a gateway without an HTTP API need not spend FastAPI's memory.
        from entities.gateway.dashboard import Dashboard
        from entities.gateway.http.admission.deadlines import with_deadlines
        from entities.gateway.http.admission.early_refusal import refusing_early
        from entities.gateway.http.admission.listener import bind, configured, serving, url_of
        from entities.gateway.http.admission.load import HttpLoad
        from entities.gateway.http.app import build_http
        from entities.gateway.http.context import HttpContext
        from entities.gateway.http.metrics import HttpMetrics
        from entities.gateway.http.readiness import ReadinessProbe
        from entities.gateway.http.sse.hub import EventHub
        from entities.gateway.machine_operations import MachineOperations
        from entities.gateway.operations.feeds import FeedOperations
        from entities.gateway.operations.job_curves import JobCurves
        from entities.gateway.services.operations import ServiceOperations

        sock = bind(self.config.http_host, self.config.http_port)
        config, registry = self.config.door, self.follower
        context = self.http = HttpContext(
            bus=self._bus,
            jobs=self.jobs,
            arrays=self.arrays,
            data_sets=self.data_sets,
            services=ServiceOperations(self.backends, self.jobs),
            accounts=AccountOperations(self.backends),
            models=self.models,
            machines=MachineOperations(self.backends),
            backends=self.backends,
            follower=self.follower,
            hub=EventHub(self._bus, self.config.sid, config.events),
            idempotency=self._idempotency,
            load=HttpLoad(config),
            connections=OpenConnections(config),
            probe=ReadinessProbe(self._bus, self.follower),
            metrics=HttpMetrics(
                self.config.sid, lambda: self.exposition, lambda: registry.view.records.values()
            ),
            dashboard=Dashboard(
                self._bus,
                self.config.sid,
                lambda: registry.view.records.values(),
                services=self.generations.book.living,
            ),
            curves=JobCurves(self._bus),
            feeds=FeedOperations(self.jobs.feeds, self.jobs.stored),
            generations=self.generations,
            backflow=self.backflow,
            calls=self.calls,
            batches=self.batches,
            config=config,
        )

        async def drain() -> None:
            """Refuses new requests, ends the streams, and waits up to `drain_s` for open requests."""
            context.load.draining = context.probe.draining = True
            context.hub.drain()
            self._keeper.drain()
            await context.dashboard.close()
            await context.load.drained(config.drain_s)

        protocol = "http" if self.config.tls is None else "https"
        server_config = configured(build_http(context), self.config.tls, self.config.proxies)
        bounded = with_deadlines(server_config.http_protocol_class, context.connections)
        server_config.http_protocol_class = refusing_early(bounded, context.load, context.metrics.shed)
        async with serving(server_config, sock, drain, context.connections):
            self.url = url_of(sock, self.config.http_host, self.config.advertised_host, protocol)
            yield

    # --- Type 2 and Type 4: the registry and the routers' load --------------------------------------------
    def _registry_changed(self, sids: frozenset[str]) -> None:
        guests = self._area.review() & self._area.guests
        if guests:  # what nobody reported
            sids |= {record.sid for record in self._area.instances() if record.endpoint.cluster in guests}
        for sid in sids:
            record = self.follower.view.records.get(sid)
            if record is not None and record.state is InstanceState.FAULTED and self._is_own_data(record):
                self._faults.report(death_of(record, self.config.sid))
        self._claims.refresh()
        self._samples.refresh()
        self._keeper.review()

    async def _on_compute(self, message: ComputeNotification, envelope: Envelope) -> None:
        now = asyncio.get_running_loop().time()
        served = serving_clusters(EntityKind.ROUTER, self.follower.view.entities())
        guests = [cluster for cluster in message.guests if cluster not in served]
        if not guests:
            self._compute[message.cluster] = (now, message.entries)
            return
        places: dict[str, list[ComputeEntry]] = {place: [] for place in (message.cluster, *guests)}
        for entry in message.entries:
            record = self.follower.view.records.get(entry.sid)
            if record is not None and record.endpoint.cluster in places:
                places[record.endpoint.cluster].append(entry)
        self._compute |= {place: (now, tuple(entries)) for place, entries in places.items()}

    def _last_compute(self) -> Mapping[str, tuple[ComputeEntry, ...]]:
        """The last Type 4 entries by cluster, without those of a router that has fallen silent."""
        oldest = asyncio.get_running_loop().time() - self.config.compute_valid_s
        return {cluster: entries for cluster, (at, entries) in self._compute.items() if at >= oldest}

    def _is_own_data(self, record: ServiceRecord) -> bool:
        return record.stage == ENTRY and self._area.covers(record.endpoint.cluster)

    # --- Type 5 --------------------------------------------------------------------------------------------
    async def _on_policy(self, message: CommunicationPolicy, envelope: Envelope) -> Ack:
        outcome = self.book.take(message)
        log.info("policy", job=message.job, revision=message.revision, outcome=outcome, reason=message.reason)
        if outcome == "ended":
            self._dispatcher.forget(message.job)
            await self._reporter.end(message.job, "entry closed")
        return Ack(note=outcome)

    def _data_instances(self) -> tuple[ServiceRecord, ...]:
        return tuple(record for record in self._area.instances() if record.stage == ENTRY)

    async def _on_claim(self, message: MicrobatchClaim, envelope: Envelope) -> None:
        if message.job in self.book.active and not message.evaluate:
            self._qos.add_microbatch(message.job)

    async def _on_sample(self, message: InstanceSample, envelope: Envelope) -> None:
        if message.job in self.book.active:
            self._qos.add_sample(message)

    def readings(self) -> Iterable[MetricReading]:
        """The gateway's metrics, for the process's exposition."""
        http, sid = self.http, self.config.sid
        if http is None:
            return chain(self._figures.readings(), self.backends.readings())
        return chain(
            self._figures.readings(),
            http.metrics.readings(),
            http.load.readings(sid),
            http.connections.readings(sid),
            http.hub.readings(),
            self.backends.readings(),
        )

    # --- this gateway's records -----------------------------------------------------------------------
    def _record(self) -> ServiceRecord:
        config = self.config
        return entity_record(
            EntityKind.GATEWAY,
            config.sid,
            self._bus.sender.incarnation,
            node=config.node,
            cluster=config.cluster,
            address=self.url or "",
            services=self._services,
        )

    @property
    def _services(self) -> tuple[str, ...]:
        return ("entry", "aggregation", "door") + (("http",) if self.url else ())

    def _registration(self) -> NodeRegistration:
        return registration_of(self._record(), *self._services)
