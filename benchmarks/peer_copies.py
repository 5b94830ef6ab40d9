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
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from own_mesh import mesh  # type: ignore[import-not-found,unused-ignore]  # beside this file

from dmsc.client.client import Client
from schemas.envelope import EntityKind
from schemas.job import JobState

WARM = 5
"""First steps of a job, left out."""
KILL_AT = 22
"""Two steps behind a checkpoint that has been written, five behind a snapshot."""
END_S = 120.0
RANDOM = random.Random(1)
"""Where in the open step the kill falls: early ones may hit before the holder has the step before."""


def spec(*, copies: bool, width: int, steps: int) -> dict[str, Any]:
    return {
        "name": "peer-copies" if copies else "no-copies",
        "model": {
            "factory": "workers.models.padded:padded_gpt",
            "args": {"layers": 4, "width": width, "heads": 4, "context": 32, "pad_ms": 3.0},
        },
        "data": {"source": "stdlib:", "sample_tokens": 32},
        "training": {
            "steps": steps,
            "microbatches": 8,
            "microbatch_samples": 1,
            "validation_microbatches": 0,
            "checkpoint_every": 10,
        },
        "parallel": {"stages": 2, "replicas": 1, "copies": copies},
    }


def clean(client: Client, width: int, *, copies: bool) -> float:
    """Median seconds per step of an undisturbed job."""
    job = client.submit(spec(copies=copies, width=width, steps=60)).job
    taken = [event.result.step_s for event in client.events(job) if event.result is not None]
    check(client, job)
    return statistics.median(taken[WARM:])


def killed(client: Client, width: int, *, copies: bool) -> tuple[float, str, bool]:
    """Seconds of stall, the SHA-256 of the weights, and whether everyone went back."""
    job = client.submit(spec(copies=copies, width=width, steps=40)).job
    taken: list[float] = []
    killed_at = done_at = 0.0
    back = False
    for event in client.events(job):
        back = back or "all back to step" in event.text
        if event.result is None:
            continue
        if not killed_at:
            taken.append(event.result.step_s)
        if event.result.step == KILL_AT and not killed_at:
            victim = f"{job}-s1-r0"
            services = client.mesh().services
            [pid] = [
                one.endpoint.pid for one in services if one.sid == victim and one.kind is EntityKind.INSTANCE
            ]
            time.sleep(RANDOM.uniform(0.0, 0.9) * statistics.median(taken[WARM:]))
            os.kill(pid, signal.SIGKILL)
            killed_at = time.monotonic()
        elif event.result.step == KILL_AT + 1 and not done_at:
            done_at = time.monotonic()
    return done_at - killed_at - statistics.median(taken[WARM:]), check(client, job), back


def check(client: Client, job: str) -> str:
    record = client.wait(job, timeout_s=END_S)
    if record.state is not JobState.DONE or record.weights is None:
        raise SystemExit(f"{job} ended as {record.state}: {record.reason}")
    return record.weights.sha256


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {"without_s": [], "with_s": [], "stall_without_s": [], "stall_with_s": []}
    digests: set[str] = set()
    returns = {True: 0, False: 0}
    with tempfile.TemporaryDirectory(prefix="dmsc-bench-") as name, mesh(Path(name)) as state:
        client = Client(state=state)
        for number in range(arguments.rounds):
            for copies in (False, True) if number % 2 else (True, False):
                seconds = clean(client, arguments.width, copies=copies)
                found["with_s" if copies else "without_s"].append(seconds)
                print(f"round {number + 1} copies={copies} {seconds * 1e3:.1f} ms a step", file=sys.stderr)
        for number in range(arguments.kills):
            for copies in (True, False):
                stall_s, digest, back = killed(client, arguments.width, copies=copies)
                digests.add(digest)
                returns[copies] += back
                found["stall_with_s" if copies else "stall_without_s"].append(stall_s)
                text = f"kill {number + 1} copies={copies} stall {stall_s:.2f} s, back: {back}"
                print(text, file=sys.stderr)
        client.close()
    ratios = [one / other - 1 for one, other in zip(found["with_s"], found["without_s"], strict=True)]
    if arguments.json:
        print(json.dumps({**found, "overhead": ratios, "digests": len(digests)}, indent=2))
        return
    if ratios:
        print(f"overhead  {statistics.median(ratios):+.1%}  ({min(ratios):+.1%} to {max(ratios):+.1%})")
    for copies, key in ((True, "stall_with_s"), (False, "stall_without_s")):
        if found[key]:
            low, middle, high = min(found[key]), statistics.median(found[key]), max(found[key])
            print(f"{key:16}  {middle:.2f} s  ({low:.2f} to {high:.2f}), went back {returns[copies]} times")
    print(f"{len(digests)} different weights in {2 * arguments.kills} runs with a kill")


if __name__ == "__main__":
    main()
