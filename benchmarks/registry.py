"""What the registry costs with thousands of instances: a process of its own, a real server, raw nats-py.

    python benchmarks/registry.py [--rounds 5] [--instances 10000] [--seconds 12] [--json]

Each round measures both sides one after the other, in alternating order, and takes their ratio; the median
and the range are printed. Everything runs on loopback.

* registrations: sent one behind the other until each is answered, which means written to the bucket; against
  nats-py's pipelined JetStream publishing (`publish_async`) of as many records of the same size into a stream
  like the bucket's. With each write synced (as in `dmsc up`), and without.
* snapshot: a new watcher until it has all records, `RegistryFollower` against a watch of nats-py's key-value
* change: from the moment that a state change is sent until a follower's callback, while every instance beats
* route table: from the moment that an instance is drained until a sender's binder has the table that says so,
  with a router as a process of its own; all instances are one job of 8 stages, and beat
* heartbeats: processor time of the registry's process ÷ wall time at one beat per instance and second
* memory: growth of the registry's resident memory ÷ instances
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import nats
import psutil

from benchmarks.harness.command import bench, command
from benchmarks.harness.figures import percentile, spread
from benchmarks.harness.meshes import new_folder
from benchmarks.harness.processes import child, turns
from benchmarks.registry_mesh import (
    STAGES,
    TOKEN,
    beating,
    mesh,
    record,
    register,
    release,
    storm,
    told_ms,
)
from bus import subjects
from bus.connection import Bus
from bus.messaging.key_value import Change
from bus.nats.jetstream import call
from bus.server.embedded import EmbeddedServer
from bus.wire import codec
from entities.presence.registry_view import RegistryFollower
from schemas.data_plane import RouteTable
from schemas.envelope import EntityKind
from schemas.registry import InstanceState, Resolve, ServiceRecord, StateChange
from schemas.signals import CommunicationPolicy, StagePolicy
from workers.routing.next_hop import Binder

KEPT = (
    *("storage", "retention", "discard", "max_msgs_per_subject", "allow_direct", "allow_rollup_hdrs"),
    *("deny_delete", "allow_msg_ttl", "subject_delete_marker_ttl", "duplicate_window", "num_replicas"),
)
"""Settings of the bucket's stream that the raw side's stream has, too."""
SMALL = 1_000
BARS = {
    "registrations": "≥ 0.7",
    "registrations, synced": "≥ 0.7",
    "snapshot": "≤ 1.5",
    "beats": "≤ 0.5 cores",
    "memory": "≤ 4096 B",
    f"change at {SMALL}": "p99 ≤ 20 ms",
    "change at all": "p99 ≤ 100 ms",
    f"route table at {SMALL}": "p99 ≤ 20 ms",
    "route table at all": "p99 ≤ 100 ms",
}
ROUTER = "router-c0"


async def raw_publish(url: str, bus: Bus, records: list[ServiceRecord]) -> float:
    """As many messages of the same size into a stream with the bucket's settings."""
    name = "RAW"
    config = (await call(bus.connection, "STREAM.INFO.KV_registry"))["config"]
    made = {key: config[key] for key in KEPT if key in config} | {"name": name, "subjects": ["raw.>"]}
    await call(bus.connection, f"STREAM.CREATE.{name}", made)
    payloads = [(f"raw.{one.sid}", codec.encode(one, bus.sender_map, bus.next_id())) for one in records]
    user, _, password = TOKEN.partition(":")
    client = await nats.connect(url, user=user, password=password)
    try:
        jetstream = client.jetstream(publish_async_max_pending=len(records))
        began = time.perf_counter()
        acks = [await jetstream.publish_async(subject, payload) for subject, payload in payloads]
        await asyncio.gather(*acks)
        return time.perf_counter() - began
    finally:
        await client.close()
        await call(bus.connection, f"STREAM.DELETE.{name}")


async def in_turns(rounds: int, ours: Callable[[int], Any], raw: Callable[[int], Any]) -> dict[str, Any]:
    """Seconds of both sides per round, and the ratio ours ÷ raw of each round."""
    times: dict[str, list[float]] = {"ours_s": [], "raw_s": []}
    sides = {"ours_s": ours, "raw_s": raw}
    for number, key in turns(list(sides), rounds):
        times[key].append(await sides[key](number))
    ratios = [ours_s / raw_s for ours_s, raw_s in zip(times["ours_s"], times["raw_s"], strict=True)]
    return {**times, "ratios": ratios}


async def registrations(instances: int, rounds: int, sync: bool) -> dict[str, Any]:
    with new_folder() as folder:
        async with mesh(folder, sync) as (server, bus, _):

            async def ours(number: int) -> float:
                job = f"round{number}"
                took_s: float = await register(bus, [record(job, each) for each in range(instances)])
                await release(bus, job)
                return took_s

            async def raw(number: int) -> float:
                return await raw_publish(server.url, bus, [record("raw", each) for each in range(instances)])

            await register(bus, [record("warm", each) for each in range(100)])
            await release(bus, "warm")
            found = await in_turns(rounds, ours, raw)
            storm_s = await storm(bus, [record("storm", each) for each in range(instances)])
    rates = {
        "storm_s": storm_s,
        "ours_per_s": [instances / took_s for took_s in found["ours_s"]],
        "raw_per_s": [instances / took_s for took_s in found["raw_s"]],
    }
    return {**rates, "ratios": [1 / ratio for ratio in found["ratios"]]}


async def snapshots(url: str, instances: int, rounds: int) -> dict[str, Any]:
    user, _, password = TOKEN.partition(":")

    async def ours(number: int) -> float:
        async with Bus.connect(url, name="watcher", kind=EntityKind.ROUTER, token=TOKEN) as bus:
            follower = RegistryFollower(bus)
            began = time.perf_counter()
            task = asyncio.create_task(follower.follow())
            await follower.current.wait()
            took_s = time.perf_counter() - began
            assert len(follower.view.records) > instances
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return took_s

    async def raw(number: int) -> float:
        client = await nats.connect(url, user=user, password=password)
        try:
            bucket = await client.jetstream().key_value("registry")
            began = time.perf_counter()
            watch = await bucket.watchall()
            seen = 0
            async for entry in watch:
                if entry is None:
                    break
                seen += 1
            took_s = time.perf_counter() - began
            assert seen > instances
            await watch.stop()  # type: ignore[no-untyped-call]  # nats-py
            return took_s
        finally:
            await client.close()

    return await in_turns(rounds, ours, raw)


async def changes(url: str, job: str, instances: int, seconds: float) -> list[float]:
    """Milliseconds from sending a state change to the callback of a follower in another connection."""
    seen: dict[str, asyncio.Future[float]] = {}

    def heard(sids: frozenset[str]) -> None:
        for sid in sids & seen.keys():
            if not seen[sid].done():
                seen[sid].set_result(time.perf_counter())

    found = []
    chosen = random.Random(1)
    async with (
        Bus.connect(url, name="agent", kind=EntityKind.CLUSTER, token=TOKEN) as agent,
        Bus.connect(url, name="watcher", kind=EntityKind.ROUTER, token=TOKEN) as bus,
    ):
        follower = RegistryFollower(bus, heard)
        task = asyncio.create_task(follower.follow())
        await follower.current.wait()
        began = time.perf_counter()
        count = 0
        while time.perf_counter() - began < seconds:
            one = record(job, chosen.randrange(instances))
            count += 1
            moved = StateChange(
                sid=one.sid, incarnation=one.incarnation, state=one.state, reason=f"change {count}"
            )
            seen = {one.sid: asyncio.get_running_loop().create_future()}
            found.append(await told_ms(agent, moved, seen[one.sid]))
            await asyncio.sleep(chosen.uniform(0.01, 0.04))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return sorted(found)


@contextlib.asynccontextmanager
async def routing(server: EmbeddedServer, bus: Bus, job: str) -> AsyncIterator[None]:
    """A router of the first cluster, in a process of its own, that routes the job."""
    policy = CommunicationPolicy(
        job=job,
        revision=1,
        entry_gateway="gateway-c0",
        clusters=("c0",),
        stages=tuple(StagePolicy(stage=stage, window=2) for stage in range(STAGES)),
        reason="bench",
    )
    environment = {"DMSC_BUS": server.url, "DMSC_BUS_TOKEN": TOKEN}
    arguments = ("run", "router", "--cluster", "c0", "--log-level", "warning")
    async with child("dmsc", *arguments, environment=environment):
        await bus.command(subjects.QOS_POLICY, policy, deadline_s=60, sid=ROUTER)
        yield


async def tables(url: str, job: str, instances: int, seconds: float) -> list[float]:
    """Milliseconds from draining an instance until a binder has a table in which it gets nothing new."""
    waiting: dict[str, asyncio.Future[float]] = {}
    began: dict[int, asyncio.Event] = {stage: asyncio.Event() for stage in range(STAGES)}
    binder = Binder("c0")

    async def heard(change: Change) -> None:
        table = change.message
        if not isinstance(table, RouteTable):
            return
        binder.update(table)
        began[table.stage].set()
        now = time.perf_counter()
        for entry in table.entries:
            if entry.weight == 0 and entry.sid in waiting and not waiting[entry.sid].done():
                waiting[entry.sid].set_result(now)

    found = []
    chosen = random.Random(2)
    async with (
        Bus.connect(url, name="agent", kind=EntityKind.CLUSTER, token=TOKEN) as agent,
        Bus.connect(url, name="sender", kind=EntityKind.INSTANCE, token=TOKEN) as bus,
    ):
        watch = await bus.bucket(subjects.ROUTE_TABLE).watch(heard, job=job, cluster="c0")
        for event in began.values():
            await event.wait()
        until = time.perf_counter() + seconds
        for number in chosen.sample(range(instances), instances):
            if time.perf_counter() > until:
                break
            one = record(job, number)
            moved = StateChange(
                sid=one.sid, incarnation=one.incarnation, state=InstanceState.DRAINING, reason="bench"
            )
            waiting = {one.sid: asyncio.get_running_loop().create_future()}
            found.append(await told_ms(agent, moved, waiting[one.sid]))
            await asyncio.sleep(chosen.uniform(0.02, 0.06))
        await watch.stop()
    return sorted(found)


async def processor_share(registry: psutil.Process, seconds: float) -> float:
    def used() -> float:
        times = registry.cpu_times()
        return float(times.user + times.system)

    before, began = used(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (used() - before) / (time.perf_counter() - began)


async def standing(instances: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All that needs a registry full of living instances."""
    found: dict[str, Any] = {}
    with new_folder() as folder:
        async with mesh(folder, True) as (server, bus, registry):
            async with beating(server.url, "warm", SMALL):
                await register(bus, [record("warm", each) for each in range(SMALL)])
                found[f"change at {SMALL}"] = await changes(server.url, "warm", SMALL, seconds)
            await release(bus, "warm")
            before = registry.memory_info().rss
            async with beating(server.url, "j", instances):
                for start in range(0, instances, SMALL):
                    await register(bus, [record("j", each) for each in range(start, start + SMALL)])
                found["memory"] = (registry.memory_info().rss - before) / instances
                found["beats"] = await processor_share(registry, seconds)
                found["change at all"] = await changes(server.url, "j", instances, seconds)
                found["snapshot"] = await snapshots(server.url, instances, rounds)
            answer = await bus.request(
                subjects.RESOLVE, Resolve(job="j", state=InstanceState.FAULTED), timeout_s=10
            )
            found["faulted"] = len(answer.records)
    return found


async def routed(instances: int, seconds: float) -> dict[str, Any]:
    """A change until the route table that follows from it is in use."""
    found: dict[str, Any] = {}
    for key, count in ((f"route table at {SMALL}", SMALL), ("route table at all", instances)):
        with new_folder() as folder:
            async with mesh(folder, True) as (server, bus, _), beating(server.url, "j", count):
                for start in range(0, count, SMALL):
                    lot = range(start, min(count, start + SMALL))
                    await register(bus, [record("j", each, InstanceState.ACTIVE) for each in lot])
                async with routing(server, bus, "j"):
                    found[key] = await tables(server.url, "j", count, seconds)
    return found


def lines(found: dict[str, Any]) -> Iterator[str]:
    instances = found["instances"]
    for key in ("registrations", "registrations, synced"):
        if key in found:
            rates = found[key]
            yield (
                f"{key:24} {spread(rates['ratios'])}× raw   ours {spread(rates['ours_per_s'], '.0f')}/s, "
                f"raw {spread(rates['raw_per_s'], '.0f')}/s   bar {BARS[key]}"
            )
            storm_s = f"{rates['storm_s']:.1f} s until the last is answered"
            yield f"{'':24} as {instances} commands at once: {storm_s}"
    if "snapshot" in found:
        times = found["snapshot"]
        yield (
            f"{'snapshot':24} {spread(times['ratios'])}× raw   ours {spread(times['ours_s'], '.3f')} s, "
            f"raw {spread(times['raw_s'], '.3f')} s   bar {BARS['snapshot']}"
        )
    for key in BARS:
        if key in found and BARS[key].startswith("p99"):
            ordered = found[key]
            yield (
                f"{key.replace('all', str(instances)):24} p50 {percentile(ordered, 0.5):.1f} ms, "
                f"p99 {percentile(ordered, 0.99):.1f} ms, longest {ordered[-1]:.1f} ms "
                f"of {len(ordered)}   bar {BARS[key]}"
            )
    if "beats" in found:
        yield f"{'heartbeats':24} {found['beats']:.2f} cores at {instances}/s   bar {BARS['beats']}"
        yield f"{'memory':24} {found['memory']:.0f} B per instance   bar {BARS['memory']}"
        yield f"{'taken for dead':24} {found['faulted']} of {instances}"


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"instances": options.instances}
    if options.only in (None, "registrations"):
        for key, sync in (("registrations, synced", True), ("registrations", False)):
            found[key] = await registrations(options.instances, options.rounds, sync)
    if options.only in (None, "standing"):
        found |= await standing(options.instances, options.rounds, options.seconds)
    if options.only in (None, "routed"):
        found |= await routed(options.instances, options.seconds)
    return found


if __name__ == "__main__":
    arguments = command(__doc__, rounds=5, instances=10_000, seconds=12.0)
    arguments.add_argument("--only", choices=("registrations", "standing", "routed"))
    bench(arguments, measure, lines)
