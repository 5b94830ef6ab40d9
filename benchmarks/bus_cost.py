"""What the typed bus costs: raw nats-py against `Bus`, in turns, on one embedded server.

    python benchmarks/bus_cost.py [--rounds 7] [--messages 20000] [--requests 2000] [--json]

Each round measures both sides one after the other (in alternating order), so that whatever else the
machine does hits both; the ratio of each round is taken, and the median and the range are printed.
The raw side sends the same bytes and leaves them unread; the typed side encodes, decodes, validates.

* publish: messages per second into a server without listeners, until the server has them all
* consume: messages per second from one publisher through one listener's handler
* request: median and 99th percentile of a request with its answer, one at a time
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from benchmarks.harness.command import bench, command
from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from bus.wire import codec
from schemas.base import Message
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Ack
from schemas.registry import Heartbeat, InstanceState, StateChange

BEAT = Heartbeat(sid="a", incarnation="i1", state=InstanceState.ACTIVE, digest="0011aabb")
CHANGE = StateChange(sid="a", incarnation="i1", state=InstanceState.ACTIVE)
TARGETS = {"publish": (0.30, "≥"), "consume": (0.50, "≥"), "request": (1.25, "≤")}


async def _raw_barrier(client: Client) -> None:
    await client.flush()
    await client.flush()  # the first one overtakes what is pending


async def raw_publish(client: Client, payload: bytes, count: int) -> float:
    subject = subjects.HEARTBEAT(sid="nobody")
    began = time.perf_counter()
    for _ in range(count):
        await client.publish(subject, payload)
    await _raw_barrier(client)
    return count / (time.perf_counter() - began)


async def typed_publish(bus: Bus, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        await bus.publish(subjects.HEARTBEAT, BEAT, sid="nobody")
    await bus.barrier()
    return count / (time.perf_counter() - began)


async def _consume(
    count: int, publish: Callable[[], Awaitable[Any]], counted: dict[str, int], done: asyncio.Event
) -> float:
    counted["left"] = count
    done.clear()
    began = time.perf_counter()
    for number in range(count):
        await publish()
        if number % 64 == 0:
            await asyncio.sleep(0)  # both sides take turns with their listener
    await done.wait()
    return count / (time.perf_counter() - began)


async def raw_consume(sender: Client, listener: Client, payload: bytes, count: int) -> float:
    """The publisher's cost is the same raw one on both sides: what differs is the listener."""
    counted, done = {"left": count}, asyncio.Event()

    async def handler(_: Msg) -> None:
        counted["left"] -= 1
        if not counted["left"]:
            done.set()

    subject = subjects.HEARTBEAT(sid="raw")
    sub = await listener.subscribe(subject, cb=handler)
    await _raw_barrier(listener)
    try:
        return await _consume(count, lambda: sender.publish(subject, payload), counted, done)
    finally:
        await sub.unsubscribe()


async def typed_consume(sender: Client, listener: Bus, payload: bytes, count: int) -> float:
    counted, done = {"left": count}, asyncio.Event()

    async def handler(_: Message, __: Envelope) -> None:
        counted["left"] -= 1
        if not counted["left"]:
            done.set()

    subject = subjects.HEARTBEAT(sid="typed")
    subscription = await listener.subscribe(subjects.HEARTBEAT, handler, sid="typed", pending_limit=1_000_000)
    try:
        return await _consume(count, lambda: sender.publish(subject, payload), counted, done)
    finally:
        await subscription.stop()


async def _latencies(ask: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    for _ in range(50):
        await ask()
    found = []
    for _ in range(count):
        began = time.perf_counter()
        await ask()
        found.append(time.perf_counter() - began)
    return sorted(found)


async def raw_request(asker: Client, service: Client, payload: bytes, count: int) -> list[float]:
    async def handler(message: Msg) -> None:
        await service.publish(message.reply, payload)

    subject = subjects.STATE_CHANGE(sid="raw")
    sub = await service.subscribe(subject, cb=handler)
    await _raw_barrier(service)
    try:
        return await _latencies(lambda: asker.request(subject, payload, timeout=5), count)
    finally:
        await sub.unsubscribe()


async def typed_request(asker: Bus, service: Bus, count: int) -> list[float]:
    async def handler(_: Message, __: Envelope) -> Ack:
        return Ack()

    subscription = await service.serve(subjects.STATE_CHANGE, handler, sid="typed")
    try:
        return await _latencies(lambda: asker.request(subjects.STATE_CHANGE, CHANGE, sid="typed"), count)
    finally:
        await subscription.stop()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; see the module's docstring for what is measured."""
    rounds, messages, requests = options.rounds, options.messages, options.requests
    samples: dict[str, list[tuple[float, float]]] = {
        "publish": [],
        "consume": [],
        "request": [],
        "request p99": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        async with (
            EmbeddedServer(Path(folder)) as server,
            Bus.connect(server.url, name="a", kind=EntityKind.CLIENT) as bus,
            Bus.connect(server.url, name="b", kind=EntityKind.CLIENT) as other,
        ):
            raw = await nats.connect(server.url)
            raw_other = await nats.connect(server.url)
            beat = codec.encode(BEAT, bus.sender_map, bus.next_id())
            change = codec.encode(CHANGE, bus.sender_map, bus.next_id())
            try:
                for number in range(rounds + 1):  # the first one warms up
                    pairs = {
                        "publish": await _both(
                            number,
                            lambda: raw_publish(raw, beat, messages),
                            lambda: typed_publish(bus, messages),
                        ),
                        "consume": await _both(
                            number,
                            lambda: raw_consume(raw, raw_other, beat, messages),
                            lambda: typed_consume(raw, other, beat, messages),
                        ),
                    }
                    latencies = await _both(
                        number,
                        lambda: raw_request(raw, raw_other, change, requests),
                        lambda: typed_request(bus, other, requests),
                    )
                    for name, share in (("request", 0.5), ("request p99", 0.99)):
                        pairs[name] = (
                            latencies[0][int(len(latencies[0]) * share)],
                            latencies[1][int(len(latencies[1]) * share)],
                        )
                    if number:
                        for name, pair in pairs.items():
                            samples[name].append(pair)
            finally:
                await raw.close()
                await raw_other.close()
    results = {name: _summary(pairs) for name, pairs in samples.items()}
    return {"rounds": rounds, "results": results}


async def _both(
    number: int, raw: Callable[[], Awaitable[Any]], typed: Callable[[], Awaitable[Any]]
) -> tuple[Any, Any]:
    if number % 2:
        first = await raw()
        return first, await typed()
    second = await typed()
    return await raw(), second


def _summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    ratios = [typed / raw for raw, typed in pairs]
    return {
        "raw": statistics.median(raw for raw, _ in pairs),
        "typed": statistics.median(typed for _, typed in pairs),
        "ratio": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{'':12} {'raw nats-py':>14} {'typed bus':>14} {'ratio':>7}  {'range':>13}  target"
    for name, row in found["results"].items():
        rate = not name.startswith("request")
        shown = [f"{row[side]:,.0f}/s" if rate else f"{row[side] * 1e6:,.0f} µs" for side in ("raw", "typed")]
        target, sign = TARGETS.get(name, (None, ""))
        yield (
            f"{name:12} {shown[0]:>14} {shown[1]:>14} {row['ratio']:>7.2f}  "
            f"{row['ratio_least']:>5.2f} – {row['ratio_most']:<5.2f}  {f'{sign} {target}' if target else ''}"
        )


if __name__ == "__main__":
    each = "per round and side"
    bench(command(__doc__, rounds=7, messages=(20_000, each), requests=(2_000, each)), measure, lines)
