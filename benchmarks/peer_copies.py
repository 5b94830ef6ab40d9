"""What a copy at a peer costs while nothing happens, and what it saves when a stage's only replica dies.

    python benchmarks/peer_copies.py [--rounds 3] [--kills 4] [--json]

One mesh, two stages of one replica each, on padded devices (`workers.models.padded`): a step lasts some
150 ms on a quiet machine. Runs with and without `parallel.copies` alternate.

    overhead   median step time with copies over that without, minus one; same round, the first steps left out
    stall      the only replica of the last stage gets SIGKILL in the middle of the job: seconds from there to
               the commit of the step that was open, minus a median step; without copies, everyone goes back
               to the newest checkpoint (every 10 steps) meanwhile
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.figures import spread
from benchmarks.harness.jobs import digest, job, step_times
from benchmarks.harness.meshes import mesh
from benchmarks.harness.processes import turns
from dmsc.client.client import Client
from schemas.envelope import EntityKind

WARM = 5
"""First steps of a job, left out."""
KILL_AT = 22
"""Two steps behind a checkpoint that has been written, five behind a snapshot."""
END_S = 120.0
RANDOM = random.Random(1)
"""Where in the open step the kill falls: early ones may hit before the holder has the step before."""


def spec(*, copies: bool, width: int, steps: int) -> dict[str, Any]:
    return job(
        "peer-copies" if copies else "no-copies",
        steps=steps,
        layers=4,
        width=width,
        pad_ms=3.0,
        training={"checkpoint_every": 10},
        parallel={"copies": copies},
    )


def clean(client: Client, width: int, *, copies: bool) -> float:
    """Median seconds per step of an undisturbed job."""
    name = client.submit(spec(copies=copies, width=width, steps=60)).job
    taken = step_times(client, name)
    digest(client.wait(name, timeout_s=END_S))
    return statistics.median(taken[WARM:])


def killed(client: Client, width: int, *, copies: bool) -> tuple[float, str, bool]:
    """Seconds of stall, the SHA-256 of the weights, and whether everyone went back."""
    name = client.submit(spec(copies=copies, width=width, steps=40)).job
    taken: list[float] = []
    killed_at = done_at = 0.0
    back = False
    for event in client.events(name):
        back = back or "all back to step" in event.text
        if event.result is None:
            continue
        if not killed_at:
            taken.append(event.result.step_s)
        if event.result.step == KILL_AT and not killed_at:
            victim = f"{name}-s1-r0"
            [pid] = [
                service.endpoint.pid
                for service in client.mesh().services
                if service.sid == victim and service.kind is EntityKind.INSTANCE
            ]
            time.sleep(RANDOM.uniform(0.0, 0.9) * statistics.median(taken[WARM:]))
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
        elif event.result.step == KILL_AT + 1 and not done_at:
            done_at = time.monotonic()
    stall_s = done_at - killed_at - statistics.median(taken[WARM:])
    return stall_s, digest(client.wait(name, timeout_s=END_S)), back


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {"without_s": [], "with_s": [], "stall_without_s": [], "stall_with_s": []}
    digests: set[str] = set()
    returns = {True: 0, False: 0}
    with mesh() as state, Client(state=state) as client:
        for number, copies in turns((True, False), options.rounds):
            seconds = clean(client, options.width, copies=copies)
            found["with_s" if copies else "without_s"].append(seconds)
            say(f"round {number + 1} copies={copies} {seconds * 1e3:.1f} ms a step")
        for number in range(options.kills):
            for copies in (True, False):
                stall_s, sha256, back = killed(client, options.width, copies=copies)
                digests.add(sha256)
                returns[copies] += back
                found["stall_with_s" if copies else "stall_without_s"].append(stall_s)
                say(f"kill {number + 1} copies={copies} stall {stall_s:.2f} s, back: {back}")
    ratios = [beside / alone - 1 for beside, alone in zip(found["with_s"], found["without_s"], strict=True)]

    returned = {"returns_with": returns[True], "returns_without": returns[False]}
    return {**found, "overhead": ratios, "digests": len(digests), **returned}


def lines(found: dict[str, Any]) -> Iterator[str]:
    if ratios := found["overhead"]:
        yield f"overhead  {statistics.median(ratios):+.1%}  ({min(ratios):+.1%} to {max(ratios):+.1%})"
    for side in ("with", "without"):
        if values := found[f"stall_{side}_s"]:
            times = spread(values, unit=" s")
            yield f"{f'stall_{side}_s':16}  {times}, went back {found[f'returns_{side}']} times"
    runs = len(found["stall_with_s"]) + len(found["stall_without_s"])
    yield f"{found['digests']} different weights in {runs} runs with a kill"


if __name__ == "__main__":
    bench(command(__doc__, rounds=3, kills=4, width=192), measure, lines)
