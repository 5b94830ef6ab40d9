"""Microservice instance cluster (MIC), one node's agent (draft §3, §4.5, §5.3, §5.5).

A cluster is a named set of such agents. Each agent offers slots, starts and stops microservice instances
through its fork server, watches them, analyses models in short-lived workers, keeps the topologies of the
jobs that it analysed, and judges how far a fault reaches. It never restarts an instance: the orchestrator
decides that. It never imports torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import psutil

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from bus.security import renewal
from bus.security.identity import Identity, is_credential, is_root
from bus.subject_row import Subject
from entities import metrics
from entities.cluster.accounts.slot_reports import SlotReports
from entities.cluster.cache_folders import CacheFolders
from entities.cluster.capabilities.kept_measurements import default_folder
from entities.cluster.capabilities.measurement import DeviceMeasurement
from entities.cluster.capabilities.peer_links import LinkRegistration
from entities.cluster.capabilities.slots import node_capability, offer_slots, present_devices
from entities.cluster.config import ClusterConfig
from entities.cluster.context import NodeContext
from entities.cluster.core import Device
from entities.cluster.data_builds.unit_workers import UnitWorkers
from entities.cluster.file_reach import FileRules
from entities.cluster.file_requests import NodeFileReader
from entities.cluster.fork_server_client import ForkServerClient, ForkServerReady
from entities.cluster.instances import NodeInstances
from entities.cluster.job_code.code_folders import CodeFolders
from entities.cluster.judgement.instance_judge import InstanceJudge
from entities.cluster.leaving.agent_leave import AgentLeave
from entities.cluster.model_tasks import ShortLivedWorkers
from entities.cluster.store_folders import StoreFolders
from entities.presence.entity_record import entity_record
from schemas.base import Message
from schemas.cluster import (
    Analyse,
    ForgetTopology,
    InstanceStart,
    InstanceStarted,
    InstanceStop,
    NodeStatus,
    Strike,
    Struck,
    WriteSample,
)
from schemas.data_set.commands import PrepareUnit
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack, DmscError, NotFound, Unavailable
from schemas.leadership import Leadership
from schemas.registry import Capability, ServiceRecord, label_tag
from schemas.task_graph import TopologyReleased
from schemas.telemetry import InstanceSample, NodeSample
from schemas.urls import UrlRules

log = get_logger("cluster")

_FAULT_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "resume": signal.SIGCONT}


class ClusterAgent:
    """The node agent as a service on the bus. `run()` until cancelled; it leaves no process behind."""

    def __init__(self, bus: Bus, config: ClusterConfig) -> None:
        self._bus = bus
        self._config = config
        self._changed = asyncio.Event()
        self._cpu: float | None = None  # busy part of all cores, once measured
        self._tasks: asyncio.TaskGroup | None = None
        kept = config.capabilities or default_folder()
        roots = (config.store_root, config.cache_root, config.code_root, kept)
        confinement, closed = config.confinement, tuple(str(root.absolute()) for root in roots)
        if confinement is not None:
            closed = (*confinement.closed, *closed)
            confinement = replace(confinement, closed=closed)
        self._stores = StoreFolders(config.store_root, keep=config.keep_stores)
        self._processes = ForkServerClient(
            name=config.sid,
            logs=config.logs,
            code_path=config.code_path,
            method=config.start_method,
            on_change=self._fork_server_changed,
            at_once=False,
            confinement=confinement,
            device_kinds=config.device_kinds,
        )
        allowed = config.allow_urls
        self._caches = CacheFolders(config.cache_root, config.cache_bytes)
        context = NodeContext(
            config=config,
            processes=self._processes,
            files=FileRules(closed)
            if allowed is None
            else FileRules(closed, UrlRules.of(allowed, os.getcwd())),
            caches=self._caches,
            credential=self._credential,
            start_task=self._task,
            send=self._send,
        )
        self._code = CodeFolders(context)
        self._instances = NodeInstances(context, self._stores, self._code, self._instances_changed)
        self._workers = ShortLivedWorkers(context, self._code)
        topology = self._workers.topologies.get
        self._accounts = SlotReports(bus, config, lambda: self._instances.ledger)
        self._links = LinkRegistration(bus, config.sid, config.times.links_s)
        self._judge = InstanceJudge(bus, context, self._instances, topology, self._changed.set, self._sampled)
        self._units = UnitWorkers(context, self._code)
        self._files = NodeFileReader(context)
        self._measurement = DeviceMeasurement(context, self._workers.turn)
        self._offered = asyncio.Event()  # cleared while the fork server is away
        self._offering: asyncio.Task[None] | None = None
        self._leave = AgentLeave(bus, config, lambda: bool(self._instances.ledger.instances))

    def _credential(self, sid: str, job: str) -> str | None:
        """An instance's credential: the agent's own, narrowed to its SID and job; a plain token unchanged."""
        token = self._config.token
        if token is None or not (is_credential(token) or is_root(token)):
            return token
        from bus.security.credentials import delegate  # cryptography: our own connection has imported it

        cluster, node = self._config.cluster, self._config.node
        instance = Identity(name=sid, kind=EntityKind.INSTANCE, cluster=cluster, node=node, job=job)
        return delegate(token, instance)

    @property
    def fork_server_pid(self) -> int | None:
        """Process id of the fork server, while there is one."""
        return self._processes.pid

    @property
    def has_left(self) -> bool:
        """Whether it ends, or has ended, because its machine goes away."""
        return self._leave.under_way

    def leave(self, deadline_s: float, reason: str) -> None:
        """The machine goes away in so many seconds: the mesh moves what runs here, then `run` returns."""
        self._leave.begin(deadline_s, reason, known=False)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Offer this node to the mesh until cancelled, or until it has left.

        `ready` is set once the node is registered. Its slots follow as a change of status when the fork
        server is warm (torch takes a second or two to load) and its devices are measured (once; a second).

        Raises:
            Unavailable: the fork server can't be started (torch missing, for instance).
        """
        async with self._processes, self._ending_instances():
            offering = asyncio.ensure_future(self._offer(ready))
            try:
                await self._leave.ends(offering)
            except BaseExceptionGroup as group:
                unavailable = group.subgroup(Unavailable)
                if unavailable is None:
                    raise
                raise _first_error(unavailable) from None

    async def _offer(self, ready: asyncio.Event | None) -> None:
        await asyncio.to_thread(self._code.drop_left_behind)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._processes.failed())
            tasks.create_task(asyncio.to_thread(self._stores.drop_left_behind))
            async with RegistrationClient(self._bus, self._record()) as presence, self._serving():
                self._bus.on_reconnect(self._on_reconnect)
                await self._bus.subscribe(subjects.LEADER, self._on_leader)
                tasks.create_task(self._report_status())
                tasks.create_task(self._report_samples())
                tasks.create_task(self._accounts.run())
                tasks.create_task(self._instances.watch_for_stopped(self._judge.stopped))
                tasks.create_task(self._judge.run())
                tasks.create_task(self._links.run(lambda links: presence.update(links=links)))
                tasks.create_task(self._follow_renewals())
                tasks.create_task(self._tend_caches())
                if ready is not None:
                    ready.set()
                self._processes.begin()  # not before: on few cores torch's import would delay our answers
                await self._offered.wait()
                record = self._record()
                await presence.update(capability=record.capability, offers=record.offers)
                way = self._processes.ready.way if self._processes.ready is not None else ""
                slots = len(self._instances.ledger.slots)
                log.info("node offers slots", node=self._config.sid, slots=slots, sandbox=way)
                while True:
                    await self._measured_again()
                    record = self._record()
                    await presence.update(capability=record.capability, offers=record.offers)

    async def _follow_renewals(self) -> None:
        """Give the instances new credentials once the agent has one, before their connections are closed."""
        token = self._config.token
        last_credential = token
        while token is not None:
            await asyncio.sleep(self._config.times.renewal_check_s)
            present = renewal.look(token)
            if present != last_credential:
                count = await asyncio.to_thread(self._instances.renew_credentials)
                renewal.taken(token)
                last_credential = present
                log.info("new credentials", node=self._config.sid, instances=count)

    async def _tend_caches(self) -> None:
        while True:
            await asyncio.to_thread(self._caches.tend)
            await asyncio.sleep(self._config.times.cache_check_s)

    # --- orders ---------------------------------------------------------------------------------------------
    async def _start(self, order: InstanceStart, envelope: Envelope) -> InstanceStarted:
        if self._leave.under_way:
            raise Unavailable(f"{self._config.sid} is leaving")
        return await self._instances.start(order)

    async def _stop(self, order: InstanceStop, envelope: Envelope) -> Ack:
        instance = self._instances.ledger.find(order.sid, order.incarnation)
        if instance is None:
            return Ack(note=f"{order.sid} {order.incarnation} is not on {self._config.sid}")
        await self._instances.end(instance, 0.0 if order.now else self._config.stop_grace_s)
        return Ack()

    async def _strike(self, order: Strike, envelope: Envelope) -> Struck:
        """Inject a fault. It is detected and reported like any other fault.

        Raises:
            NotFound: that incarnation does not run here.
        """
        instance = self._instances.ledger.find(order.sid, order.incarnation)
        if instance is None or instance.pid is None:
            raise NotFound(f"{order.sid} {order.incarnation} does not run on {self._config.sid}")
        with suppress(ProcessLookupError):  # it ended before
            os.kill(instance.pid, _FAULT_SIGNALS[order.fault])
        log.warning("fault injected", sid=order.sid, fault=order.fault, pid=instance.pid, user=order.user)
        return Struck(
            agent=self._config.sid,
            sid=order.sid,
            incarnation=order.incarnation,
            fault=order.fault,
            pid=instance.pid,
        )

    async def _analyse(self, order: Analyse, envelope: Envelope) -> Ack:
        return self._workers.analyse(order, self._device(), self._speed())

    async def _write_sample(self, order: WriteSample, envelope: Envelope) -> Ack:
        return self._workers.write_sample(order, self._device())

    async def _prepare(self, order: PrepareUnit, envelope: Envelope) -> Ack:
        return self._units.prepare(order)

    async def _forget(self, order: ForgetTopology, envelope: Envelope) -> TopologyReleased:
        """Draft §4.4(6): drop the job's topology, workers, remaining instances and local stores."""
        await self._workers.forget(order.job)
        await self._units.forget(order.job)
        remaining = self._instances.ledger.of_job(order.job)
        await asyncio.gather(
            *(self._instances.end(instance, self._config.stop_grace_s) for instance in remaining)
        )
        self._instances.ledger = self._instances.ledger.forget(order.job)
        await asyncio.to_thread(self._stores.drop, order.job)
        await self._code.forget(order.job)
        return TopologyReleased(job=order.job, cluster=self._config.cluster, node=self._config.node)

    # --- reports to the mesh --------------------------------------------------------------------------------
    def _status(self) -> NodeStatus:
        fork_server = self._processes.ready
        return NodeStatus(
            sid=self._config.sid,
            cluster=self._config.cluster,
            node=self._config.node,
            incarnation=self._bus.sender.incarnation,
            slots=self._judge.marked(self._instances.ledger.slots),
            address=self._config.address,
            warm=self._offered.is_set(),
            sealing_key=self._bus.keyring.public,
            torch_version=fork_server.torch_version if fork_server is not None else "",
        )

    def _record(self) -> ServiceRecord:
        config = self._config
        record = entity_record(
            EntityKind.CLUSTER,
            config.sid,
            self._bus.sender.incarnation,
            node=config.node,
            cluster=config.cluster,
            pid=os.getpid(),
            address=config.address,
        )
        labels = (label_tag(key, value) for key, value in sorted(config.labels.items()))
        tags = (f"cluster:{config.cluster}", f"node:{config.node}", *labels)
        slots = self._instances.ledger.slots
        offers = dict.fromkeys(
            slot.capability().model_copy(update={"device": slot.kind}).model_dump_json() for slot in slots
        )
        return record.model_copy(
            update={
                "capability": node_capability(slots, config.labels, os.cpu_count() or 1),
                "offers": tuple(map(Capability.model_validate_json, offers)),
                "tags": tags,
            }
        )

    async def _report_status(self) -> None:
        """Send the status at the start, on each change and reconnect, and periodically for a new leader."""
        reported = True
        while True:
            self._changed.clear()
            every = self._config.status_every_s
            try:
                await self._bus.command(
                    subjects.NODE_STATUS, self._status(), deadline_s=every, sid=self._config.sid
                )
                reported = True
            except DmscError as error:
                if reported:
                    log.warning(
                        "status of this node not received by the orchestrator",
                        node=self._config.sid,
                        error=error.text,
                    )
                reported = False
            with suppress(TimeoutError):
                async with asyncio.timeout(every):
                    await self._changed.wait()

    async def _report_samples(self) -> None:
        psutil.cpu_percent()  # the first call only starts the measurement
        while True:
            await asyncio.sleep(self._config.sample_every_s)
            memory = psutil.virtual_memory()
            self._cpu = psutil.cpu_percent() / 100
            sample = NodeSample(
                cluster=self._config.cluster,
                node=self._config.node,
                cpu=self._cpu,
                memory_used_bytes=memory.total - memory.available,
                memory_total_bytes=memory.total,
                instances=len(self._instances.ledger.instances),
            )
            with suppress(DmscError):  # a lost sample does no harm
                await self._bus.publish(subjects.NODE_SAMPLE, sample, agent=self._config.sid)

    def readings(self) -> Iterator[metrics.MetricReading]:
        """The metrics of this node at this moment."""
        place = {"cluster": self._config.cluster, "node": self._config.node}
        memory = psutil.virtual_memory()
        if self._cpu is not None:
            yield metrics.NODE_CPU(self._cpu, **place)
        yield metrics.NODE_MEMORY(memory.total - memory.available, **place)
        yield metrics.NODE_MEMORY_TOTAL(memory.total, **place)
        yield metrics.NODE_SLOTS(len(self._instances.ledger.slots), **place)
        yield metrics.NODE_INSTANCES(len(self._instances.ledger.instances), **place)

    async def _send(self, row: Subject, message: Message, **tokens: Any) -> None:
        """Send a command that should arrive even if its receiver is being restarted; give up in the end.

        Raises:
            DmscError: the receiver refuses it.
        """
        times = self._config.times
        for _ in range(times.command_attempts):
            try:
                await self._bus.command(
                    row, message, deadline_s=times.command_s, while_heard=True, cause=None, **tokens
                )
                return
            except Unavailable as error:
                log.warning(f"{row.name} not received", node=self._config.sid, error=error.text, **tokens)

    # --- lifecycle ------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        agent = self._config.sid
        subscriptions = [
            await self._bus.serve(subjects.START_INSTANCE, self._start, agent=agent),
            await self._bus.serve(subjects.STOP_INSTANCE, self._stop, agent=agent),
            await self._bus.serve(subjects.JUDGE, self._judge.judge, agent=agent),
            await self._bus.serve(subjects.STRIKE, self._strike, agent=agent),
            await self._bus.serve(subjects.LEAVE, self._leave.order, agent=agent),
            await self._bus.serve(subjects.ANALYSE, self._analyse, agent=agent),
            await self._bus.serve(subjects.WRITE_SAMPLE, self._write_sample, agent=agent),
            await self._bus.serve(subjects.READ_FILES, self._files.read, agent=agent),
            await self._bus.serve(subjects.REMOVE_CHECKPOINTS, self._files.remove, agent=agent),
            await self._bus.serve(subjects.FORGET_TOPOLOGY, self._forget, agent=agent),
            await self._bus.serve(subjects.PREPARE_UNIT, self._prepare, agent=agent),
            await self._bus.serve(subjects.REMOVE_OBJECTS, self._files.remove_objects, agent=agent),
        ]
        try:
            yield
        finally:
            await asyncio.gather(*(subscription.stop() for subscription in subscriptions))

    @asynccontextmanager
    async def _ending_instances(self) -> AsyncIterator[None]:
        """At the end stop all instances, then report their ends to the registry if it listens."""
        try:
            yield
        finally:
            self._tasks = None
            changes = await self._instances.end_all(self._config.stop_grace_s)
            await self._accounts.last()
            await self._instances.report_last(self._bus, changes)

    def _task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        if self._tasks is None:
            work.close()
            raise Unavailable(f"{self._config.sid} is ending")
        return self._tasks.create_task(work)

    def _sampled(self, sample: InstanceSample) -> None:
        self._links.take(sample)
        self._accounts.take(sample)

    def _instances_changed(self) -> None:
        self._accounts.look()
        self._judge.refresh()
        self._changed.set()
        self._leave.look()

    def _fork_server_changed(self) -> None:
        """The fork server became ready (offer its devices) or was lost (report the node as not warm)."""
        self._offered.clear()
        if self._offering is not None:
            self._offering.cancel()
        if self._processes.ready is not None and self._tasks is not None:
            self._offering = self._tasks.create_task(self._offer_slots(self._processes.ready))
        self._changed.set()

    async def _offer_slots(self, ready: ForkServerReady) -> None:
        config, memory_bytes = self._config, psutil.virtual_memory().total
        devices = () if config.device == "cpu" else ready.devices
        measured = await self._measurement.of(self._devices(ready), ready)
        slots = offer_slots(
            devices,
            config.slots,
            os.cpu_count() or 1,
            memory_bytes,
            measured,
            config.labels,
            config.emulated_slots,
        )
        self._instances.offer(slots)
        self._offered.set()
        self._changed.set()

    def _devices(self, ready: ForkServerReady) -> tuple[Device, ...]:
        memory_bytes = psutil.virtual_memory().total
        return present_devices(() if self._config.device == "cpu" else ready.devices, memory_bytes)

    async def _measured_again(self) -> None:
        """Returns once devices that were measured beside other work have other figures."""
        while True:
            await asyncio.sleep(self._config.times.measure_again_s)
            ready, busy = self._processes.ready, 1.0 if self._cpu is None else self._cpu
            if ready is None or not self._offered.is_set() or busy > self._config.rests_below:
                continue
            devices = self._devices(ready)
            if self._instances.ledger.instances or not self._measurement.is_disturbed(devices, ready):
                continue
            if await self._measurement.again(devices, ready) and self._processes.ready is ready:
                await self._offer_slots(ready)
                return

    async def _on_reconnect(self) -> None:
        self._changed.set()

    async def _on_leader(self, message: Leadership, envelope: Envelope) -> None:
        self._changed.set()
        self._judge.repeat()

    def _speed(self) -> dict[str, float]:
        """Of what a short-lived worker computes on, which knows nothing of emulated slots."""
        slots = self._instances.ledger.slots
        if not slots:
            return {}
        return dict.fromkeys(slots[0].speed, 1.0) if slots[0].emulated else dict(slots[0].speed)

    def _device(self) -> str:
        return self._instances.ledger.slots[0].device if self._instances.ledger.slots else "cpu"


def _first_error(group: BaseExceptionGroup[Unavailable]) -> Unavailable:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Unavailable)
    return error
