#!/usr/bin/env python3
"""How long the mesh is without a leading orchestrator when the leader is killed.

    python benchmarks/failover.py [--rounds N]

A server, a service registry, two orchestrators; in each round the leader gets SIGKILL and is started again
as a follower. Prints the milliseconds from the kill to the new leader's word that it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator

from benchmarks.harness.command import bench, command
from benchmarks.harness.meshes import new_folder
from bus import subjects
from bus.connection import Bus
from bus.server.embedded import EmbeddedServer
from schemas.envelope import EntityKind, Envelope
from schemas.leadership import Leadership

ORCHESTRATORS = 2
SETTLE_S = 2.0
"""Between rounds: the one that was killed is to stand by again."""


async def start(url: str, entity: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dmsc", "run", entity, "--log-level", "error"),
        env={**os.environ, "DMSC_BUS": url},
    )


async def measure(options: argparse.Namespace) -> list[float]:
    times_ms: list[float] = []
    with new_folder() as folder:
        async with (
            EmbeddedServer(folder) as server,
            Bus.connect(server.url, name="stopwatch", kind=EntityKind.CLIENT) as bus,
        ):
            leaders: asyncio.Queue[Leadership] = asyncio.Queue()

            async def on_leader(message: Leadership, envelope: Envelope) -> None:
                leaders.put_nowait(message)

            await bus.subscribe(subjects.LEADER, on_leader)
            processes = [await start(server.url, "service-registry")]
            processes += [await start(server.url, "orchestrator") for _ in range(ORCHESTRATORS)]
            try:
                leader = await leaders.get()
                for _ in range(options.rounds):
                    await asyncio.sleep(SETTLE_S)
                    victim = next(process for process in processes if process.pid == leader.pid)
                    began = time.perf_counter()
                    victim.kill()
                    leader = await leaders.get()
                    times_ms.append((time.perf_counter() - began) * 1e3)
                    await victim.wait()
                    processes[processes.index(victim)] = await start(server.url, "orchestrator")
            finally:
                for process in processes:
                    process.terminate()
                await asyncio.gather(*(process.wait() for process in processes))
    return times_ms


def lines(times_ms: list[float]) -> Iterator[str]:
    yield "each    " + " ".join(f"{each:.0f}" for each in times_ms) + " ms"
    yield f"median  {statistics.median(times_ms):.0f} ms"
    yield f"longest {max(times_ms):.0f} ms"


if __name__ == "__main__":
    bench(command(__doc__, rounds=10), measure, lines)
