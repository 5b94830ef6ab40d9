"""How long one waits: from `dmsc up` to a ready mesh, from submitting a job to its first step; and memory.

    python benchmarks/readiness.py [--rounds 5] [--json]

Each round starts a mesh of two clusters of its own and trains two steps of a small job over two stages of two
replicas, twice: the first right away (`first job`), the second with the nodes' fork servers surely warm
(`warm job`). Step 0 has begun when the job says `running`. Memory is resident, after two jobs, from one more
round with a process for each entity.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import psutil

from benchmarks.harness.command import bench, command
from benchmarks.harness.jobs import done, job
from benchmarks.harness.meshes import mesh
from dmsc import Client
from dmsc.state.state_folder import StateFolder
from schemas.job import JobState

SPEC = job(
    "readiness",
    steps=2,
    microbatches=4,
    samples=2,
    layers=2,
    width=64,
    context=64,
    training={"checkpoint_every": "auto"},
    replicas=2,
)


def until_running_s(client: Client) -> float:
    """Seconds from submitting the job to its first step; waits for its end."""
    began = time.monotonic()
    running_s = None
    submitted = client.submit(SPEC)
    for event in client.events(submitted.job):
        if event.state is JobState.RUNNING and running_s is None:
            running_s = time.monotonic() - began
    record = done(client.job(submitted.job))
    if running_s is None:
        raise SystemExit(f"{record.job} ended without having begun to run")
    return running_s


def one_round(*more: str) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds, and MiB by process; `more` are options of `dmsc up`."""
    began = time.monotonic()
    with mesh(None, *more, slots=2) as state, Client(state=state) as client:
        seconds = {"command": time.monotonic() - began}
        file = StateFolder(state).mesh()
        assert file is not None
        assert file.ready_at is not None
        seconds["up to ready"] = file.ready_at - file.started_at
        seconds["first job"] = until_running_s(client)
        seconds["warm job"] = until_running_s(client)
        memory = {
            name: psutil.Process(pid).memory_info().rss / 2**20
            for name, pid in file.children.items()
            if not name.startswith("agent")
        }
    return seconds, memory


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    rounds = [one_round()[0] for _ in range(options.rounds)]
    seconds = {name: [values[name] for values in rounds] for name in rounds[0]}
    return {"seconds": seconds, "resident_mib": one_round("--separate")[1]}


def lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, values in found["seconds"].items():
        yield f"{name:20} {statistics.median(values):6.2f} s   {min(values):.2f} to {max(values):.2f}"
    for name, value in sorted(found["resident_mib"].items()):
        yield f"{name:20} {value:6.1f} MiB"


if __name__ == "__main__":
    bench(command(__doc__, rounds=5), measure, lines)
