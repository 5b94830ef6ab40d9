"""The dashboard with 1,000 instances: frame times in a headless Chromium, and what viewers cost the gateway.

    python benchmarks/dashboard.py [--instances 1000] [--seconds 20] [--viewers 1] [--shot FILE]
                                   [--trace FILE] [--json]

A process of its own generates the traffic of a mesh: each instance's sample once a second with six links,
hops of microbatches, committed steps, now and then an instance that is faulted and replaced. It goes over a
real server through the real gateway, which a stand-in for registry, orchestrator and authorizer lets begin.

* frames: times between two animation frames of the page while it draws all of that. A headless Chromium
  without a GPU draws by software, on the cores that everything else here uses, too: with a GPU it is less.
* gateway: processor time of its process ÷ wall time, without a viewer and with them
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog

from benchmarks.harness.command import bench, command
from benchmarks.harness.figures import percentile
from benchmarks.harness.processes import child
from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from entities.gateway import Gateway, GatewayConfig
from schemas.base import Message
from schemas.data_plane import MicrobatchNotice, RouteEntry, RouteTable
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack
from schemas.gateway_api import JobSummary, MeshStatus
from schemas.job import JobEvent, StepResult
from schemas.module_status import ModuleList
from schemas.registry import Endpoint, InstanceState, ServiceRecord
from schemas.signals import AccessDecision, RegistrationLease, Role, RouteAdvertisement
from schemas.step import Member
from schemas.telemetry import InstanceSample, LinkFigures, LinkSample

JOB = "large"
STAGES = 8
CLUSTERS = ("a", "b", "c", "d")
HOPS_PER_S = 1000
STEPS_PER_S = 2
LINKS = 6
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TRACED = ("devtools.timeline", "disabled-by-default-devtools.timeline", "cc", "viz", "v8.execute")
MEASURE = """(seconds) => new Promise((done) => {
  const times = [];
  let before = performance.now();
  const until = before + 1000 * seconds;
  const frame = (now) => {
    times.push(now - before);
    before = now;
    if (now < until) requestAnimationFrame(frame);
    else done(times.slice(1));
  };
  requestAnimationFrame(frame);
})"""


def records(count: int) -> list[ServiceRecord]:
    """`count` instances: one in sixteen makes data, the others are spread evenly over stages and clusters."""
    found = []
    for index in range(count):
        stage = -1 if index % 16 == 0 else index % STAGES
        unit = "data" if stage < 0 else f"s{stage}"
        cluster = CLUSTERS[(index // STAGES) % len(CLUSTERS)]
        found.append(
            ServiceRecord(
                sid=f"{JOB}-{unit}-r{index}",
                prefix=f"train/{JOB}/{unit}",
                kind=EntityKind.INSTANCE,
                incarnation="i1",
                state=InstanceState.ACTIVE,
                endpoint=Endpoint(cluster=cluster, node=f"{cluster}-n{index % 5}"),
                job=JOB,
                stage=stage,
            )
        )
    return found


class Traffic:
    """What a mesh of that size says, from a process of its own."""

    def __init__(self, bus: Bus, count: int) -> None:
        self.bus = bus
        self.random = random.Random(1)
        self.records = records(count)
        self.by_stage: dict[int, list[ServiceRecord]] = {}
        for record in self.records:
            self.by_stage.setdefault(record.stage if record.stage is not None else -1, []).append(record)
        self.revision = 1

    async def run(self) -> None:
        bucket = self.bus.bucket(subjects.ROUTE_TABLE)
        for stage, members in self.by_stage.items():
            if stage >= 0:
                await bucket.put(self._table(stage, members), job=JOB, cluster="a", stage=stage)
        async with asyncio.TaskGroup() as tasks:
            for work in (self._registry(), self._samples(), self._hops(), self._steps()):
                tasks.create_task(work)

    @staticmethod
    def _table(stage: int, members: list[ServiceRecord]) -> RouteTable:
        entries = tuple(
            RouteEntry(
                sid=one.sid,
                incarnation="i1",
                cluster=one.endpoint.cluster,
                weight=1.0,
                window=4,
                reason="weight 1; 20.0 ms per microbatch",
            )
            for one in members
        )
        return RouteTable(job=JOB, cluster="a", stage=stage, revision=1, router="router-a", entries=entries)

    async def _registry(self) -> None:
        while True:
            await self.bus.publish(
                subjects.ADVERTISEMENT,
                RouteAdvertisement(
                    revision=self.revision, previous=0, full=True, changed=tuple(self.records)
                ),
            )
            await asyncio.sleep(4)
            index = self.random.randrange(len(self.records))
            known = self.records[index]
            state = InstanceState.FAULTED if known.state is InstanceState.ACTIVE else InstanceState.ACTIVE
            self.records[index] = known.model_copy(update={"state": state})
            self.revision += 1

    async def _samples(self) -> None:
        while True:
            for record in list(self.records):
                await self.bus.publish(
                    subjects.INSTANCE_SAMPLE, self._sample(record), job=JOB, sid=record.sid
                )
                await asyncio.sleep(0.9 / len(self.records))

    def _sample(self, record: ServiceRecord) -> InstanceSample:
        stage = record.stage if record.stage is not None else -1
        peers = self.by_stage.get(stage + 1, [])
        chosen = random.Random(record.sid).sample(peers, min(LINKS, len(peers)))
        links = tuple(
            LinkSample(
                peer=peer.sid,
                sent_bytes=self.random.randrange(10_000, 900_000),
                transfers=4,
                transfer_ms=8.0,
                figures=LinkFigures(latency_ms=0.4, transfer_ms=2.0 + self.random.random()),
            )
            for peer in chosen
        )
        return InstanceSample(
            job=JOB,
            sid=record.sid,
            incarnation="i1",
            cluster=record.endpoint.cluster,
            node=record.endpoint.node,
            stage=stage,
            step=1,
            queue=self.random.randrange(4),
            in_flight=2,
            service_ms=18 + 6 * self.random.random(),
            busy=self.random.random(),
            links=links,
        )

    async def _hops(self) -> None:
        number = 0
        while True:
            for _ in range(HOPS_PER_S // 20):
                number += 1
                stage = self.random.randrange(-1, STAGES - 1)
                ends = [
                    self.random.choice(self.by_stage[stage]),
                    self.random.choice(self.by_stage[stage + 1]),
                ]
                forward = number % 2 == 0
                sender, receiver = ends if forward else reversed(ends)
                notice = MicrobatchNotice(
                    job=JOB,
                    epoch=1,
                    step=number // 64,
                    attempt=0,
                    microbatch=number % 64,
                    stage=receiver.stage or 0,
                    direction="forward" if forward else "backward",
                    sender=Member(sid=sender.sid, incarnation="i1"),
                    receiver=Member(sid=receiver.sid, incarnation="i1"),
                    link="l",
                    tag=number,
                    tensors=(),
                )
                await self.bus.publish(subjects.NOTICE, notice, job=JOB, sid=receiver.sid)
            await asyncio.sleep(0.05)

    async def _steps(self) -> None:
        step = 0
        while True:
            shares = {one.sid: 1 + self.random.randrange(8) for one in self.records if one.stage != -1}
            result = StepResult(
                step=step,
                loss=1.5 + 3 / (1 + step / 20),
                gradient_norm=1.0,
                learning_rate=1e-3,
                tokens=100_000,
                step_s=0.5,
                tokens_per_s=190_000 + 20_000 * self.random.random(),
                shares=shares,
            )
            event = JobEvent(job=JOB, kind="step", at=time.time(), result=result)
            await self.bus.append(subjects.JOB_EVENT, event, job=JOB)
            step += 1
            await asyncio.sleep(1 / STEPS_PER_S)


async def stand_in(bus: Bus) -> None:
    """What a gateway needs to begin: somebody who registers it, lets everybody in, and knows one job."""

    async def lease(message: Message, envelope: Envelope) -> Message:
        return RegistrationLease(
            sid=envelope.sender.name, route_id=1, heartbeat_s=5.0, expiry_s=60.0, revision=1
        )

    async def ack(message: Message, envelope: Envelope) -> Message:
        return Ack()

    async def allow(message: Message, envelope: Envelope) -> Message:
        return AccessDecision(allow=True, user="bench", role=Role.ADMIN, reason="benchmark")

    async def mesh(message: Message, envelope: Envelope) -> Message:
        job = JobSummary(job=JOB, name=JOB, state="running", step=1, steps=100_000)
        return MeshStatus(services=(), nodes=(), jobs=(job,))

    async def modules(message: Message, envelope: Envelope) -> Message:
        return ModuleList(modules=())

    for row, handler in (
        (subjects.REGISTRATION, lease),
        (subjects.STATE_CHANGE, ack),
        (subjects.MESH_REGISTRATION, ack),
        (subjects.ACCESS, allow),
        (subjects.MESH_QUERY, mesh),
        (subjects.MODULE_QUERY, modules),
    ):
        await bus.serve(row, handler)


async def feed(url: str, count: int) -> None:
    async with Bus.connect(url, name="traffic", kind=EntityKind.CLIENT) as bus:
        await stand_in(bus)
        print("ready", flush=True)
        await Traffic(bus, count).run()


async def cpu(seconds: float) -> float:
    """Processor time of this process, the gateway's, ÷ wall time."""
    used, began = time.process_time(), time.monotonic()
    await asyncio.sleep(seconds)
    return (time.process_time() - used) / (time.monotonic() - began)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    from playwright.async_api import async_playwright

    browser_path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if browser_path is None:
        raise SystemExit("no Chromium on the PATH: install one (Debian: chromium)")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = await stack.enter_async_context(EmbeddedServer(Path(folder), sync_always=False))
        bus = await stack.enter_async_context(
            Bus.connect(server.url, name="gateway-a", kind=EntityKind.GATEWAY)
        )
        await bus.provision()
        gateway = Gateway(bus, GatewayConfig(cluster="a", http_port=0))
        running: asyncio.Task[None] | None = None
        arguments = (__file__, "--feed", server.url, "--instances", str(options.instances))
        await stack.enter_async_context(child(*arguments, until_line=True))
        try:
            ready = asyncio.Event()
            running = asyncio.create_task(gateway.run(ready))
            await ready.wait()
            await asyncio.sleep(3)
            alone = await cpu(5)
            playwright = await stack.enter_async_context(async_playwright())
            chromium = await playwright.chromium.launch(executable_path=browser_path, args=list(FLAGS))
            pages = []
            for _ in range(options.viewers):
                page = await chromium.new_page(viewport={"width": options.width, "height": 900})
                await page.goto(f"{gateway.url}/dashboard/#token=any")
                await page.wait_for_selector("#link-state .s-live", timeout=60_000)
                pages.append(page)
            await pages[0].wait_for_function(
                "(count) => document.querySelector('.stagebox')?.ariaLabel?.startsWith(count)",
                arg=f"{options.instances} instances",
                timeout=60_000,
            )
            await asyncio.sleep(3)
            if options.trace:
                await chromium.start_tracing(page=pages[0], path=options.trace, categories=list(TRACED))
            frames, watched = await asyncio.gather(
                pages[0].evaluate(MEASURE, options.seconds), cpu(options.seconds)
            )
            if options.trace:
                await chromium.stop_tracing()
            if options.shot:
                await pages[0].screenshot(path=options.shot)
            await chromium.close()
        finally:
            if running is not None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    frames.sort()
    return {
        "instances": options.instances,
        "viewers": options.viewers,
        "frames": len(frames),
        "p50_ms": round(statistics.median(frames), 1),
        "p95_ms": round(percentile(frames, 0.95), 1),
        "p99_ms": round(percentile(frames, 0.99), 1),
        "worst_ms": round(frames[-1], 1),
        "gateway_cpu_alone": round(alone, 2),
        "gateway_cpu_watched": round(watched, 2),
        "load_average": round(os.getloadavg()[0], 1),
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['instances']} instances, {found['frames']} frames drawn by software: "
        f"p50 {found['p50_ms']} ms, p95 {found['p95_ms']} ms, p99 {found['p99_ms']} ms, "
        f"worst {found['worst_ms']} ms"
    )
    yield (
        f"gateway: {found['gateway_cpu_alone']} cores without a viewer, "
        f"{found['gateway_cpu_watched']} cores with {found['viewers']}; load average {found['load_average']}"
    )


if __name__ == "__main__":
    parser = command(
        __doc__,
        instances=1000,
        seconds=20.0,
        viewers=1,
        width=1440,
        shot=("", "where a picture of the page goes"),
        trace=("", "where Chromium's trace goes; it costs frames"),
    )
    parser.add_argument("--feed", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.feed:
        asyncio.run(feed(options.feed, options.instances))
    else:
        bench(parser, measure, lines)
