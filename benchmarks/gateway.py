"""What one gateway on one core does: event streams and requests at once, overload, clients that do not read.

    python benchmarks/gateway.py [--streams 1000] [--rate 500] [--clients 16] [--seconds 15] [--json]

The gateway is a process of its own, bound to core 0 where there are several; server, registry, authorizer,
orchestrator and the clients share the others. Requests are sent at fixed times, and their latency counts from
when they were due (no coordinated omission). Every stream is to get one event per second.

* load: latency of requests and of events while all streams are open
* capacity: reads a second that a few clients get, each of which asks again as soon as it has its answer
* overload: more requests than the core can do, then a flood with an unknown token: what is refused, how fast,
  and what follows
* slow: clients that open a stream and read nothing, while a job tells much: what it costs whom
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.harness.command import command
from benchmarks.harness.emptiness import measuring
from benchmarks.harness.figures import percentile
from benchmarks.harness.http_connection import Connection, once, request
from benchmarks.harness.meshes import new_folder
from bus import subjects
from bus.connection import Bus
from bus.logs import configure_logging
from bus.server.embedded import EmbeddedServer
from schemas.envelope import EntityKind
from schemas.job import JobEvent

USERS = ("ann", "bob", "cid", "dan", "eve")
"""Researchers; each one's token is the name. `eve` is the greedy one."""
JOB = {"name": "tiny", "model": {"factory": "models:build"}, "training": {"steps": 2}}
BAR_MS = 50.0
CONNECTIONS = 64


# --- the parts, each a process ------------------------------------------------------------------------------


async def run_behind(url: str, folder: Path) -> None:
    from entities.authorizer import Authorizer, AuthorizerConfig
    from entities.orchestrator import Orchestrator, OrchestratorConfig
    from entities.service_registry.service import ServiceRegistry, ServiceRegistryConfig

    entries = [
        {
            "name": user,
            "role": "researcher",
            "token_sha256": hashlib.sha256(user.encode()).hexdigest(),
        }
        for user in USERS
    ]
    users = folder / "users.json"
    users.write_text(json.dumps({"users": entries}))
    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:

        async def bus(name: str, kind: EntityKind) -> Bus:
            return await stack.enter_async_context(Bus.connect(url, name=name, kind=kind))

        registry = await bus("service-registry", EntityKind.SERVICE_REGISTRY)
        await registry.provision()
        tasks.create_task(ServiceRegistry(registry, ServiceRegistryConfig()).run())
        authorizer = Authorizer(
            await bus("authorizer", EntityKind.AUTHORIZER), AuthorizerConfig(tokens_file=users)
        )
        tasks.create_task(authorizer.run())
        smo = await bus("orchestrator", EntityKind.ORCHESTRATOR)
        tasks.create_task(Orchestrator(smo, OrchestratorConfig()).run())


async def run_gateway(url: str, folder: Path) -> None:
    from entities.gateway import Gateway, GatewayConfig
    from entities.gateway.http.config import HttpConfig
    from entities.gateway.http.rate_limit import RequestRate
    from entities.gateway.http.sse.format import EventsConfig

    # Generous to identities, but for the one that is to meet its limit: the bounds of the process count here.
    door = HttpConfig(
        rate=RequestRate(per_s=5_000.0, burst=5_000),
        unknown_rate=RequestRate(per_s=100.0, burst=200),
        events=EventsConfig(streams_each=5_000, streams=5_000),
    )
    async with Bus.connect(url, name="gateway-a", kind=EntityKind.GATEWAY) as bus:
        await bus.provision()
        gateway = Gateway(bus, GatewayConfig(cluster="a", http_port=0, door=door))
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(gateway.run(ready))
            await ready.wait()
            (folder / "gateway.url").write_text(gateway.url or "")


@dataclass
class Parts:
    """What runs."""

    bus_url: str
    url: str
    gateway: psutil.Process
    bus: Bus


@contextlib.asynccontextmanager
async def running(folder: Path, cores: list[int]) -> AsyncIterator[Parts]:
    """Everything but the clients; gone afterwards."""
    others = cores[1:] or cores
    os.sched_setaffinity(0, others)
    processes: list[subprocess.Popen[bytes]] = []
    async with EmbeddedServer(folder / "nats", sync_always=False) as server:
        try:
            processes += [start(role, server.url, folder) for role in ("behind", "gateway")]
            os.sched_setaffinity(processes[1].pid, cores[:1])
            found = folder / "gateway.url"
            url = await url_in(found, processes)
            await until_ready(url)
            async with Bus.connect(server.url, name="events", kind=EntityKind.ORCHESTRATOR) as bus:
                yield Parts(server.url, url, psutil.Process(processes[1].pid), bus)
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait(20)


def start(role: str, bus_url: str, folder: Path) -> subprocess.Popen[bytes]:
    options = ["--role", role, "--bus", bus_url, "--folder", str(folder)]
    return subprocess.Popen([sys.executable, __file__, *options])


async def url_in(file: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    while not (url := content(file)):
        if any(process.poll() is not None for process in processes):
            raise SystemExit("a part of the benchmark ended while starting; its words stand above")
        await asyncio.sleep(0.05)
    return url


def content(file: Path) -> str:
    return file.read_text() if file.exists() else ""


# --- clients ------------------------------------------------------------------------------------------------


async def until_ready(url: str) -> None:
    while True:
        if (await once(url, "GET", "/readyz")).status == 200:
            return
        await asyncio.sleep(0.1)


@dataclass
class Streams:
    """Event streams that are read as they come: delays in seconds, from the event's own time."""

    delays: list[float] = field(default_factory=list)
    open: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def add(self, url: str, job: str, token: str) -> None:
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(request("GET", f"/v1/jobs/{job}/events", token))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        self.open += 1
        self.tasks.append(asyncio.create_task(self._read(reader, writer)))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65_536):
                now = time.time()
                for at in re.findall(rb'"kind":"sample","at":([0-9.]+)', piece):
                    self.delays.append(now - float(at))
        finally:
            self.open -= 1
            writer.close()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def tell(bus: Bus, job: str, text: str = "") -> None:
    event = JobEvent(job=job, kind="sample", at=time.time(), sample=text)
    await bus.append(subjects.JOB_EVENT, event, job=job)


async def tell_every_second(bus: Bus, jobs: Sequence[str]) -> None:
    """One event per job and second, spread over the second."""
    loop, due, number = asyncio.get_running_loop(), asyncio.get_running_loop().time(), 0
    while True:
        await tell(bus, jobs[number % len(jobs)])
        number += 1
        due += 1 / len(jobs)
        await asyncio.sleep(max(0.0, due - loop.time()))


@dataclass
class Outcome:
    """Latencies in seconds by status."""

    latencies: dict[int, list[float]] = field(default_factory=dict)

    def add(self, status: int, latency_s: float) -> None:
        self.latencies.setdefault(status, []).append(latency_s)

    def of(self, *statuses: int) -> list[float]:
        return [latency for status in statuses for latency in self.latencies.get(status, ())]

    @property
    def counts(self) -> dict[str, int]:
        return {str(status): len(found) for status, found in sorted(self.latencies.items())}


async def fire(
    url: str,
    paths: Sequence[str],
    tokens: Sequence[str],
    rate: float,
    seconds: float,
    connections: int = CONNECTIONS,
) -> Outcome:
    """`rate` requests a second, each at its time, over so many connections."""
    outcome = Outcome()
    loop = asyncio.get_running_loop()
    free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
    for _ in range(connections):
        free.put_nowait(Connection(url))
    began = loop.time()

    async def one(number: int, due: float) -> None:
        connection = await free.get()
        answer = await connection.ask("GET", paths[number % len(paths)], tokens[number % len(tokens)])
        outcome.add(answer.status, loop.time() - due)
        free.put_nowait(connection)

    tasks = []
    for number in range(int(rate * seconds)):
        due = began + number / rate
        if due > loop.time():
            await asyncio.sleep(due - loop.time())
        tasks.append(asyncio.create_task(one(number, due)))
    await asyncio.gather(*tasks)
    while not free.empty():
        free.get_nowait().close()
    return outcome


def times(values: Sequence[float]) -> str:
    if not values:
        return "none"
    points = [1e3 * percentile(values, part) for part in (0.5, 0.99, 1.0)]
    return "p50 {:.1f}, p99 {:.1f}, most {:.1f} ms".format(*points)


# --- the measurements ---------------------------------------------------------------------------------------


async def measure(options: argparse.Namespace, parts: Parts) -> dict[str, Any]:
    jobs = []
    for number in range(options.jobs + 1):
        token = USERS[number % 4]
        answer = await once(parts.url, "POST", "/v1/jobs", token, json.dumps(JOB).encode())
        jobs.append(json.loads(answer.body)["job"])
    talker = jobs.pop()
    mix = [f"/v1/jobs/{job}" for job in jobs] * 7 + ["/v1/jobs?limit=20"] * len(jobs) * 2
    mix += [f"/v1/jobs/{job}/load" for job in jobs]
    found: dict[str, Any] = {}
    telling = asyncio.create_task(tell_every_second(parts.bus, jobs))
    streams = Streams()
    try:
        opened = time.perf_counter()
        for number in range(options.streams):
            await streams.add(parts.url, jobs[number % len(jobs)], USERS[number % 4])
        found["streams_opened_s"] = time.perf_counter() - opened
        found |= await load(options, parts, mix, streams)
        found |= await capacity(options, parts, mix)
        found |= await overload(options, parts, mix)
        found |= await slow(parts, talker)  # nobody else follows it
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await streams.close()
    return found


async def load(options: argparse.Namespace, parts: Parts, mix: list[str], streams: Streams) -> dict[str, Any]:
    await fire(parts.url, mix, USERS[:4], options.rate, 2.0)  # warm
    streams.delays.clear()
    cpu, began = sum(parts.gateway.cpu_times()[:2]), time.perf_counter()
    outcome = await fire(parts.url, mix, USERS[:4], options.rate, options.seconds)
    took = time.perf_counter() - began
    used = (sum(parts.gateway.cpu_times()[:2]) - cpu) / took
    latencies = outcome.of(200)
    print(f"load: {options.rate:g} requests/s and {streams.open} streams at 1 event/s, {took:.0f} s")
    print(f"  requests   {outcome.counts}; {times(latencies)}; bar: p99 ≤ {BAR_MS:g} ms")
    print(f"  events     {len(streams.delays) / took:.0f}/s delivered; {times(streams.delays)}")
    print(f"  gateway    {100 * used:.0f} % of a core, {parts.gateway.memory_info().rss / 2**20:.0f} MiB")
    return {
        "requests": outcome.counts,
        "request_p50_ms": 1e3 * percentile(latencies, 0.5),
        "request_p99_ms": 1e3 * percentile(latencies, 0.99),
        "events_per_s": len(streams.delays) / took,
        "event_p99_ms": 1e3 * percentile(streams.delays, 0.99),
        "gateway_cores": used,
        "gateway_mib": parts.gateway.memory_info().rss / 2**20,
    }


async def capacity(options: argparse.Namespace, parts: Parts, mix: list[str]) -> dict[str, Any]:
    outcome = Outcome()
    loop = asyncio.get_running_loop()
    until = loop.time() + options.seconds

    async def client(number: int) -> None:
        connection = Connection(parts.url)
        while (began := loop.time()) < until:
            answer = await connection.ask("GET", mix[number % len(mix)], USERS[number % 4])
            outcome.add(answer.status, loop.time() - began)
            number += 1
        connection.close()

    cpu = sum(parts.gateway.cpu_times()[:2])
    await asyncio.gather(*(client(number) for number in range(options.clients)))
    used = (sum(parts.gateway.cpu_times()[:2]) - cpu) / options.seconds
    rate = len(outcome.of(200)) / options.seconds
    print(f"capacity: {options.clients} clients, {options.seconds:g} s")
    print(f"  reads      {rate:.0f}/s, {outcome.counts}; {times(outcome.of(200))}")
    print(f"  gateway    {100 * used:.0f} % of a core")
    return {"reads_per_s": rate, "reads_p50_ms": 1e3 * percentile(outcome.of(200), 0.5)}


async def overload(options: argparse.Namespace, parts: Parts, mix: list[str]) -> dict[str, Any]:
    rate = options.rate * options.overload
    hit = await fire(parts.url, mix, USERS[:4], rate, 5.0, connections=512)
    refused = hit.of(429, 503)
    began = time.perf_counter()
    while True:  # until a second passes in which nothing is refused and the bar holds
        after = await fire(parts.url, mix, USERS[:4], options.rate / 2, 1.0)
        latencies = after.of(200)
        if latencies and not after.of(429, 503) and 1e3 * percentile(latencies, 0.99) <= BAR_MS:
            break
        if time.perf_counter() - began > 20:
            break
    recovered = time.perf_counter() - began
    # Nobody, from one address: what a flood of bad tokens costs.
    flood = await fire(parts.url, mix, ["nobody"], 400, 3.0)
    print(f"overload: {rate:g} requests/s for 5 s")
    print(f"  answered   {hit.counts}; 200: {times(hit.of(200))}; refused: {times(refused)}")
    print(
        f"  afterwards p99 ≤ {BAR_MS:g} ms, none refused at {options.rate / 2:g}/s: within {recovered:.1f} s"
    )
    print(f"  400/s with an unknown token: {flood.counts}; 429: {times(flood.of(429))}")
    return {
        "overload": hit.counts,
        "overload_refused_p99_ms": 1e3 * percentile(refused, 0.99) if refused else None,
        "recovered_s": recovered,
        "flood": flood.counts,
    }


async def slow(parts: Parts, job: str) -> dict[str, Any]:
    """Clients that read nothing while a job tells 60 MB: what that costs its teller, and the gateway."""
    text = "x" * 20_000
    count = 3_000

    async def tell_all() -> float:
        began = time.perf_counter()
        pending: set[asyncio.Task[None]] = set()
        for _ in range(count):
            pending.add(asyncio.create_task(tell(parts.bus, job, text)))
            if len(pending) >= 16:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*pending)
        return count / (time.perf_counter() - began)

    before = parts.gateway.memory_info().rss
    place = urlsplit(parts.url)
    writers = []
    for _ in range(50):
        reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1024)
        writer.write(request("GET", f"/v1/jobs/{job}/events", "ann"))
        await reader.readuntil(b"\r\n\r\n")
        writers.append((reader, writer))
    told_per_s = await tell_all()
    probe = await fire(parts.url, ["/v1/jobs?limit=20"], USERS[:4], 100, 3.0)
    grown = (parts.gateway.memory_info().rss - before) / 2**20
    lagged = 0
    for reader, writer in writers:
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(5):
                rest = b""
                while piece := await reader.read(1 << 20):
                    rest = (rest + piece)[-4096:]
                    if b"event: lagged" in rest:
                        lagged += 1
                        break
        writer.close()
    print("slow: 50 clients that read nothing while one job tells 60 MB")
    print(f"  told       {told_per_s:.0f} events/s; requests meanwhile and after: {times(probe.of(200))}")
    print(f"  gateway    {grown:+.0f} MiB; {lagged} of 50 were told `lagged` once they read")
    return {"slow_told_per_s": told_per_s, "slow_grown_mib": grown, "slow_lagged": lagged}


async def bench(options: argparse.Namespace) -> None:
    with new_folder() as folder:
        async with running(folder, sorted(os.sched_getaffinity(0))) as parts:
            found = await measure(options, parts)
    if options.json:
        print(json.dumps(found))


def main() -> None:
    parser = command(
        __doc__,
        streams=1000,
        rate=(500.0, "requests per second"),
        seconds=15.0,
        jobs=(10, "that the streams follow"),
        clients=(16, "that ask without a pause"),
        overload=(6.0, "times the rate"),
    )
    parser.add_argument("--role", choices=("behind", "gateway"), help=argparse.SUPPRESS)
    parser.add_argument("--bus", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    configure_logging(level="error")
    if options.role is not None:
        gc.set_threshold(20_000, 20, 50)  # as `dmsc run` does
        role = run_behind if options.role == "behind" else run_gateway
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(until_terminated(role(options.bus, options.folder)))
        return
    asyncio.run(until_terminated(bench(options)))


async def until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """A bench that is ended from outside ends its parts, too."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


if __name__ == "__main__":
    with measuring():
        main()
