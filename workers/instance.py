"""The life of a microservice instance (draft §3 MI, §4.4): register, build, serve orders, leave.

A fork server starts it on the order of a node agent; its child process runs `main`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from bus.connection import Bus
from bus.log_shipping import ship_logs
from bus.logs import bind_process, configure_logging, get_logger
from bus.mesh.registration import RegistrationClient
from bus.messaging.key_value import Change
from bus.scheduling_class import displace_others
from bus.security import renewal
from bus.subjects import INSTANCE_SAMPLE, ROUTE_TABLE, STORE_QUERY
from bus.tasks import TaskSet, background
from bus.wire import secret_urls
from bus.wire.correlation import correlate
from schemas.cluster import InstanceStart
from schemas.envelope import EntityKind
from schemas.errors import BadModel, DmscError, Fenced, PeerUnreachable
from schemas.registry import (
    PASSING,
    PASSING_EXIT,
    READY,
    Capability,
    Endpoint,
    InstanceState,
    ServiceRecord,
)
from schemas.step import Member
from schemas.task_graph import TaskUnit, UnitKind, is_before_entry
from schemas.telemetry import InstanceSample
from workers.compute.attribution import failing_microbatch
from workers.compute.compute_thread import ComputeThread
from workers.compute.determinism import compute_exactly
from workers.data.storage import node_cache
from workers.devices.emulated_slot import EmulatedSlotConditions
from workers.graph.compiled import check_compiler
from workers.links.link_config import LinkConfig
from workers.links.link_shaping import Shaping
from workers.local_store.local_store import LocalStore
from workers.local_store.recorder import StoreRecorder
from workers.models.padded import emulate
from workers.process.url_rules import restrict_urls
from workers.requirements import check_requirements
from workers.serving.runtime.serving_runtime import ServingRuntime
from workers.stage.data_runtime import DataRuntime
from workers.stage.hop_runtime import HopRuntime, InstanceContext
from workers.stage.preprocess_runtime import PreprocessRuntime, SamplesRuntime
from workers.stage.stage_runtime import StageRuntime
from workers.stage.startup_progress import StartupConfig, reporting_progress
from workers.telemetry.instance_telemetry import InstanceTelemetry, TelemetryConfig
from workers.transport.link_authentication import secret_of
from workers.user_code import code_digest, describe

log = get_logger("instance")

SAMPLE_VARIABLE = "DMSC_SAMPLE_S"
"""Environment variable: `TelemetryConfig.every_s`."""

FAILED_EXIT = 3
"""Exit code of an instance that fenced itself; the reason is in the registry and in its log."""


class InstancePayload(BaseModel):
    """What a fork server passes to `main` (see `workers.process.fork_server`)."""

    start: InstanceStart
    servers: list[str]
    token: str | None = None
    cluster: str
    node: str
    agent: str
    address: str = "127.0.0.1"
    ports: tuple[int, int] | None = None
    device: str = "cpu"
    capability: Capability = Capability()
    """What its slot can do."""
    script: Path | None = None
    """Of an emulated slot: what happens to it (`schemas.slot_conditions`)."""
    store: Path | None = None
    renewal: str = ""  # file in `store` with the credential that replaces `token`
    dial_s: float = 90.0
    """How long it tries to connect; a deployment waits longer, so that a stall fails none."""
    correlation: str | None = None
    cause: str | None = None
    urls: list[str] | None = None
    cache: Path | None = None

    def emulated_slot(self) -> EmulatedSlotConditions | None:
        """Its slot, if that stands for another device."""
        if not self.capability.emulated:
            return None
        return EmulatedSlotConditions(self.capability.speed["stage"], self.script)


def main(payload: dict[str, Any], result: Path | None = None) -> int:
    """Entry point of an instance's process; returns its exit code."""
    displace_others()  # the node agent, which may have started it, displaces nobody
    parsed = InstancePayload.model_validate(payload)
    training = parsed.start.spec.training
    compute_exactly(training.compute_threads, training.seed, strict=not parsed.start.inexact)
    configure_logging()
    secret_urls.learn(parsed.start.secrets)
    restrict_urls(parsed.urls)
    node_cache.grant(parsed.cache, parsed.start.unit.sid)
    if (slot := parsed.emulated_slot()) is not None:
        emulate(slot)
    try:
        return asyncio.run(Instance(parsed).run())
    except DmscError as error:  # the registry has no reason then: the node agent reads the log's last line
        print(f"{parsed.start.unit.sid} did not get to the registry: {error.text}", file=sys.stderr)
        return PASSING_EXIT if error.retryable else FAILED_EXIT


class Instance:
    """One incarnation of one unit."""

    def __init__(self, payload: InstancePayload, startup: StartupConfig = StartupConfig()) -> None:
        self.payload = payload
        self.start = payload.start
        self.unit = payload.start.unit
        self.job = payload.start.job
        self._startup = startup
        self.member = Member(sid=self.unit.sid, incarnation=self.start.incarnation)
        self.store = LocalStore(payload.store, self.member)
        self.recorder = StoreRecorder(self.store, self.unit.stage)
        self._stop = asyncio.Event()
        self._failure: DmscError | None = None
        self._was_ready = False
        self._reports = TaskSet()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._stop.set)
        if self.payload.store is not None and self.payload.renewal:
            renewal.follow(self.payload.token, self.payload.store / self.payload.renewal)
        async with (
            Bus.connect(
                self.payload.servers,
                name=self.unit.sid,
                kind=EntityKind.INSTANCE,
                token=self.payload.token,
                incarnation=self.start.incarnation,
                connect_timeout_s=self.payload.dial_s,
            ) as bus,
            self.store,
            AsyncExitStack() as stack,
        ):
            place = self.payload.model_dump(include={"cluster", "node", "agent", "address", "device"})
            bind_process(job=self.job, sid=self.unit.sid, stage=self.unit.stage)
            if self.payload.correlation:
                bind_process(correlation=self.payload.correlation)
            correlate(self.payload.correlation, cause=self.payload.cause)
            self.recorder.begins(self.start, pid=os.getpid(), **place)
            await stack.enter_async_context(background(ship_logs(bus)))
            # No limit here: the orchestrator that ordered the instance ends it at its own deadline.
            presence = await stack.enter_async_context(
                RegistrationClient(bus, self._record(), register_s=math.inf)
            )
            try:
                self._check_code()
                self._check_compiler()
                await self._serve(bus, presence, stack)
            except DmscError as error:
                self._fail(error)
            except Exception as error:  # user code may raise anything
                log.error("instance ended by an unexpected error", sid=self.unit.sid, exc_info=error)
                self._fail(DmscError(describe(error)))
            wants = self._failure is not None and self._failure.retryable and not self._was_ready
            await self._take_leave(presence, wants)
        if self._failure is None:
            return 0
        return PASSING_EXIT if wants else FAILED_EXIT

    async def _take_leave(self, presence: RegistrationClient, wants: bool) -> None:
        """Reports the end to the registry; ignores an unreachable registry and one with a newer incarnation.

        Args:
            wants: The instance never was ready, because the bus, a store or a peer was missing.
        """
        correlate(self.payload.correlation)
        with contextlib.suppress(DmscError):
            if self._failure is None:
                self.recorder.event("state", "draining: stopping")
                await presence.change(InstanceState.DRAINING, "stopping")
                return
            self.recorder.event("state", f"faulted: {self._failure.text}")
            log.error("instance failed", sid=self.unit.sid, reason=self._failure.text)
            fault = "" if self._failure.retryable else self._failure.code
            reason = f"{PASSING}: {self._failure.text}" if wants else self._failure.text
            await presence.change(
                InstanceState.FAULTED, reason, fault=fault, culprit=failing_microbatch(self._failure)
            )

    async def _serve(self, bus: Bus, presence: RegistrationClient, stack: AsyncExitStack) -> None:
        runtime: HopRuntime | ServingRuntime
        context = InstanceContext(
            bus=bus,
            start=self.start,
            member=self.member,
            cluster=self.payload.cluster,
            node=self.payload.node,
            failed=self._fail,
            broken=lambda peer, error: self._link_broke(runtime, peer, error),
            links=LinkConfig(
                secret=secret_of(self.start),
                address=self.payload.address,
                ports=self.payload.ports,
                target=self.payload.device,
                shaping=Shaping.of_environment(os.environ, self.payload.emulated_slot()),
            ),
        )
        if is_before_entry(self.unit.stage):
            runtime = SamplesRuntime(context)
        elif self.unit.is_data:
            runtime = (PreprocessRuntime if self.unit.kind is UnitKind.PREPROCESS else DataRuntime)(context)
        elif self.start.spec.serve is not None:
            if self.payload.device != "cpu":
                log.warning(
                    "a service computes on the processor", sid=self.unit.sid, slot=self.payload.device
                )
            runtime = ServingRuntime(context, thread=await self._compute_thread(stack))
        else:
            runtime = StageRuntime(
                context,
                device=torch.device(self.payload.device),
                thread=await self._compute_thread(stack),
                admitted=partial(self._admitted, presence),
                cut_anew=lambda unit: self._reports.create(self._describe(presence, unit)),
            )
        bind_process(step=lambda: runtime.step)
        async with reporting_progress(presence, self._startup):
            await runtime.build()
        stack.push_async_callback(runtime.close)
        await runtime.open()
        await self._subscribe(bus, runtime, stack)

        async def table_changed(change: Change) -> None:
            if change.message is not None:
                self.recorder.routes(runtime.route(change.message, change.revision))

        watch = await bus.bucket(ROUTE_TABLE).watch(table_changed, job=self.job)
        stack.push_async_callback(watch.stop)
        self._was_ready = True
        joins = self.start.joins and not self.unit.is_data
        if isinstance(runtime, ServingRuntime):  # nobody admits it: its tags say what it is
            joins = False
            await presence.update(tags=(*presence.record.tags, *runtime.tags))
        await presence.tell(InstanceState.PENDING if joins else InstanceState.ACTIVE, READY)
        self.recorder.event("state", f"{presence.record.state}: {READY}")
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._telemetry(bus, runtime).run()),
                tasks.create_task(self._end_when_fenced(presence)),
            ]
            await self._stop.wait()
            for task in background:
                task.cancel()

    async def _compute_thread(self, stack: AsyncExitStack) -> ComputeThread:
        return await stack.enter_async_context(ComputeThread(f"compute-{self.unit.sid}"))

    def _admitted(self, presence: RegistrationClient) -> None:
        """Marks a newcomer to a running job as active: routers may name it from now on."""
        if presence.record.state is InstanceState.PENDING:
            self._reports.create(self._activate(presence))

    async def _activate(self, presence: RegistrationClient) -> None:
        with contextlib.suppress(DmscError):
            await presence.tell(InstanceState.ACTIVE, "admitted")

    async def _describe(self, presence: RegistrationClient, unit: TaskUnit) -> None:
        """Has the registry know the tensors at the edges of its layers, which are others from now on."""
        with contextlib.suppress(DmscError):  # the next registration, which is soon, carries them
            await presence.update(input_schema=unit.input_schema, output_schema=unit.output_schema)

    async def _end_when_fenced(self, presence: RegistrationClient) -> None:
        """Ends this instance once the registry knows a newer incarnation of its SID."""
        await presence.fenced.wait()
        self._fail(Fenced(f"{self.unit.sid} {self.member.incarnation} was replaced"))

    async def _subscribe(self, bus: Bus, runtime: HopRuntime | ServingRuntime, stack: AsyncExitStack) -> None:
        for row, handle in runtime.served():
            obey = self.recorder.audited(row, handle)
            subscription = await bus.serve(row, obey, job=self.job, sid=self.unit.sid)
            stack.push_async_callback(subscription.stop, False)
        reading = await bus.serve(STORE_QUERY, self.recorder.read, job=self.job, sid=self.unit.sid)
        stack.push_async_callback(reading.stop, False)

    def _telemetry(self, bus: Bus, runtime: HopRuntime | ServingRuntime) -> InstanceTelemetry:
        async def publish(sample: InstanceSample) -> None:
            await bus.publish(INSTANCE_SAMPLE, sample, job=self.job, sid=self.unit.sid)
            self.recorder.sample(sample)

        place = {
            "job": self.job,
            "sid": self.unit.sid,
            "incarnation": self.member.incarnation,
            "cluster": self.payload.cluster,
            "node": self.payload.node,
            "stage": self.unit.stage,
        }
        config = TelemetryConfig()
        if every_s := os.environ.get(SAMPLE_VARIABLE):
            config = replace(config, every_s=float(every_s))
        return InstanceTelemetry(runtime, place, self.payload.device, publish, config)

    def _link_broke(self, runtime: HopRuntime | ServingRuntime, peer: Member, error: PeerUnreachable) -> None:
        """Reports a broken link to the router: it may be the first sign of a death."""
        self.recorder.event("link", f"to {peer.sid} {peer.incarnation}: {error.text}")
        self._reports.create(runtime.link_broke(peer, error))

    def _fail(self, error: DmscError) -> None:
        if self._failure is None:
            self._failure = error
        self._stop.set()

    def _check_code(self) -> None:
        """Refuses user code that differs from the analysed code: it must be the same on every node."""
        spec = self.start.spec
        check_requirements(spec.code, self.payload.node)
        digest = code_digest(*spec.user_callables)
        if digest != self.start.code_digest:
            raise BadModel(
                f"{spec.model.factory} on node {self.payload.node} differs from the one that was analysed "
                f"({digest[:12]} ≠ {self.start.code_digest[:12]}): install the same code on every node"
            )

    def _check_compiler(self) -> None:
        """Refuses another compiler than the analysed one: layers that it compiles would have other bits."""
        if not self.start.compiler or self.unit.is_data:
            return
        node = self.payload.node
        if check_compiler(node, self.payload.device) != self.start.compiler:
            raise BadModel(
                f"node {node} has another torch, C++ compiler or processor than the node that analysed the "
                "job, so that compiled layers have other bits: leave training.compile out, or name clusters "
                "of like nodes in parallel.clusters"
            )

    def _record(self) -> ServiceRecord:
        return ServiceRecord(
            sid=self.unit.sid,
            prefix=f"train/{self.job}/{self.unit.part}",
            kind=EntityKind.INSTANCE,
            incarnation=self.start.incarnation,
            state=InstanceState.PENDING,
            endpoint=Endpoint(
                cluster=self.payload.cluster,
                node=self.payload.node,
                pid=os.getpid(),
                address=self.payload.address,
            ),
            capability=self.payload.capability.model_copy(
                update={"compute_threads": self.start.spec.training.compute_threads}
            ),
            input_schema=self.unit.input_schema,
            output_schema=self.unit.output_schema,
            tags=self.unit.tags,
            job=self.job,
            stage=self.unit.stage,
        )
