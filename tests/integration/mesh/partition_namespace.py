"""In network namespaces: two nodes that both reach the bus, until one can no longer reach the other.

    unshare --user --map-root-user --net python partition_namespace.py FOLDER

This process's own namespace has the server, the control plane and a bridge; each node agent, with its
instances, has one with a cable to that bridge. Isolated ports of a bridge reach the bridge, and not each
other: so the cut takes tensors alone. Behind the first step nothing is computed before the cut is there, and
behind the next one nothing before the job is on one side. Prints one JSON object of what became of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bus import subjects
from bus.parent_death import end_with_parent
from bus.server.embedded import EmbeddedServer
from dmsc.launch import prefork_server
from entities.cluster.fork_server_process import INCUBATOR
from schemas.job import JobRecord, JobSpec
from tests import warm_processes
from tests.integration.mesh.own_mesh import CLUSTERS, OwnMesh, Witness

if TYPE_CHECKING:
    from tests.integration.mesh.pass_gates import Gates

BRIDGE, NET = "10.99.0.1", "10.99.0.{}/24"
STEPS = 4
TRAINING = {"steps": STEPS, "microbatches": 4, "seed": 11}
NO_INCUBATOR = {INCUBATOR: "none"}
"""Its abstract socket is in one namespace: a node in another does not reach it."""

PRELOADED = ["tests.integration.mesh.own_mesh", "dmsc.cli", *prefork_server.PRELOADED]
"""All but torch: who needs that is not forked from here. Each process that is reads this file again: what
imports torch is imported where it is used."""


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


@contextmanager
def cabled() -> Iterator[dict[str, tuple[str, list[str]]]]:
    """Address of each cluster's node, and the words before a command that is to run there."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "bridge", "type", "bridge")
    run("ip", "address", "add", NET.format(1), "dev", "bridge")
    run("ip", "link", "set", "bridge", "up")
    holders = {name: subprocess.Popen(["unshare", "--net", "sleep", "600"]) for name in CLUSTERS}
    try:
        found = {}
        for number, (name, holder) in enumerate(holders.items(), start=2):
            there = ["nsenter", "--target", str(holder.pid), "--net"]
            port = f"port-{name}"
            while subprocess.run([*there, "ip", "link", "show", port], capture_output=True).returncode == 0:
                pass
            run("ip", "link", "add", port, "type", "veth", "peer", "name", "cable", "netns", holder.pid)
            run("ip", "link", "set", port, "master", "bridge", "up")
            run(*there, "ip", "link", "set", "lo", "up")
            run(*there, "ip", "address", "add", NET.format(number), "dev", "cable")
            run(*there, "ip", "link", "set", "cable", "up")
            found[name] = (NET.format(number).partition("/")[0], there)
        yield found
    finally:
        for holder in holders.values():
            holder.kill()
            holder.wait()


def cut() -> None:
    for name in CLUSTERS:
        run("bridge", "link", "set", "dev", f"port-{name}", "isolated", "on")


def gate(folder: Path) -> Path:
    """Where passes ask whether they may go on; a path is found from every network namespace."""
    return folder / "gate"


def spec(folder: Path) -> JobSpec:
    from tests.integration.mesh.conftest import gated_job

    parallel = {"stages": 2, "replicas": 2, "clusters": list(CLUSTERS)}
    return gated_job("cut", gate(folder), TRAINING, parallel)


async def on_one_side(client: Witness, job: str) -> None:
    """Returns once all the job's instances are placed in the same cluster."""

    def moved(record: JobRecord) -> bool:
        return record.graph is not None and len({place.cluster for place in record.graph.placements}) == 1

    await client.until_value(subjects.JOB_RECORD, moved, job=job)


async def trained(client: Witness, wanted: JobSpec, gates: Gates) -> tuple[JobRecord, list[str], list[int]]:
    gates.close()
    job = await client.submit(wanted)
    texts: list[str] = []
    steps: list[int] = []
    cut_at_s = 0.0
    async for event in client.events(job):
        if event.text:
            texts.append(f"{event.kind}: {event.text}")
        if event.result is None:
            continue
        steps.append(event.result.step)
        if len(steps) == 1:
            cut()
            cut_at_s = time.time()
            gates.close(after=1)
        elif len(steps) == 2:
            await on_one_side(client, job)
            gates.begin()
        if len(steps) > 1:
            print(f"step {event.result.step} {event.at - cut_at_s:.1f} s after the cut", file=sys.stderr)
    return await client.record(job), texts, steps


async def main(folder: Path) -> None:
    from tests.integration.mesh.pass_gates import gates_at

    with cabled() as nodes:
        async with EmbeddedServer(folder / "nats", host=BRIDGE, sync_always=False) as server:
            mesh = OwnMesh(folder, [server], slots=6, nodes=nodes)
            with mesh.running():
                async with mesh.client() as client, gates_at(gate(folder), TRAINING) as gates:
                    await client.ready()
                    record, texts, steps = await trained(client, spec(folder), gates)
    told = {
        "state": record.state,
        "reason": record.reason,
        "weights": record.weights.sha256 if record.weights else "",
        "steps": steps,
        "texts": texts,
        "places": [place.cluster for place in record.graph.placements] if record.graph else [],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    end_with_parent(os.getppid())
    os.environ.update(NO_INCUBATOR)
    warm_processes.PRELOADED[:] = PRELOADED
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # in order: the namespaces' holders go, too
    asyncio.run(main(Path(sys.argv[1])))
