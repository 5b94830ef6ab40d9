"""Tensor links on this machine: latency and throughput of a hop, time to build links and reduction groups.

    python benchmarks/links.py

Two processes and a nats-server, all on loopback; medians.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.harness.emptiness import measuring
from benchmarks.harness.figures import percentile
from benchmarks.harness.meshes import new_folder
from benchmarks.harness.processes import child
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from schemas.data_plane import MicrobatchNotice
from schemas.envelope import EntityKind
from schemas.step import Member
from workers.links.hop_exchange import HopExchange
from workers.links.offers import TensorTransfer
from workers.links.reduction import ReductionGroup

JOB = "benchmark"
HERE, THERE = Member(sid="here", incarnation="1"), Member(sid="there", incarnation="1")


def accept(notice: MicrobatchNotice) -> str:
    return "accepted"


async def hop(exchange: HopExchange, to: Member, number: int, tensor: Tensor) -> None:
    await exchange.send(
        TensorTransfer(direction="forward", receiver=to, stage=0, step=0, microbatch=number, tensors=[tensor])
    )


async def echo(url: str) -> None:
    """The other process: prints, per hop, when its tensors were there (this machine's monotonic clock)."""
    torch.set_num_threads(1)

    def received(notice: MicrobatchNotice, tensors: Sequence[Tensor]) -> None:
        print(time.monotonic_ns(), flush=True)

    async with (
        Bus.connect(url, name="there", kind=EntityKind.INSTANCE) as bus,
        HopExchange(bus, member=THERE, job=JOB, epoch=0, decide=accept, received=received),
    ):
        print("ready", flush=True)
        await asyncio.Event().wait()


async def lag(stop: asyncio.Event, pauses: list[float]) -> None:
    """How much later than asked the event loop comes back, every millisecond, in ms."""
    while not stop.is_set():
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        pauses.append((time.perf_counter() - began) * 1e3 - 1)


async def hops(url: str, bus: Bus) -> None:
    async with (
        child(__file__, url, until_line=True, environment={"PYTHONPATH": os.getcwd()}) as other,
        HopExchange(
            bus, member=HERE, job=JOB, epoch=0, decide=accept, received=lambda notice, tensors: None
        ) as exchange,
    ):
        assert other.stdout is not None
        began = time.perf_counter()
        await hop(exchange, THERE, 0, torch.ones(1))
        print(f"first hop, link built: {(time.perf_counter() - began) * 1e3:.1f} ms")
        await other.stdout.readline()
        for size, count in ((1 << 10, 200), (4 << 20, 50), (256 << 20, 3)):
            tensor = torch.ones(size // 4)
            arrived: list[float] = []
            confirmed: list[float] = []
            pauses: list[float] = []
            stop = asyncio.Event()
            watching = asyncio.create_task(lag(stop, pauses))
            for number in range(count):
                sent = time.monotonic_ns()
                await hop(exchange, THERE, number, tensor)
                confirmed.append((time.monotonic_ns() - sent) / 1e6)
                arrived.append((int(await other.stdout.readline()) - sent) / 1e6)
            stop.set()
            await watching
            there, known = statistics.median(arrived), statistics.median(confirmed)
            print(
                f"{size:>11,} bytes: there after {there:.2f} ms, sender knows after {known:.2f} ms, "
                f"{size / there / 1e6:.2f} GB/s; event loop late by {percentile(pauses, 0.99):.2f} ms (p99)"
            )


async def groups(bus: Bus) -> None:
    for size in (2, 4):
        members = [Member(sid=f"replica-{number}", incarnation="1") for number in range(size)]
        took: list[float] = []
        for generation in range(20):
            began = time.perf_counter()
            built = await asyncio.gather(
                *(
                    ReductionGroup.build(
                        bus, job=JOB, stage=size, generation=generation, members=members, me=member
                    )
                    for member in members
                )
            )
            took.append((time.perf_counter() - began) * 1e3)
            for group in built:
                group.release()
                await group.released_fully()
        print(
            f"reduction group of {size} built in {statistics.median(took):.1f} ms (all ranks in one process)"
        )


async def main() -> None:
    torch.set_num_threads(1)
    with new_folder() as folder:
        async with (
            EmbeddedServer(folder, sync_always=False) as server,
            Bus.connect(server.url, name="here", kind=EntityKind.INSTANCE) as bus,
        ):
            await bus.provision()
            await hops(server.url, bus)
            await groups(bus)


if __name__ == "__main__":
    with measuring():
        asyncio.run(echo(sys.argv[1]) if len(sys.argv) > 1 else main())
