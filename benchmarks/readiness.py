"""How long one waits: from `dmsc up` to a ready mesh, from submitting a job to its first step; and memory.

    python benchmarks/readiness.py [--rounds 5] [--json]

Each round starts a mesh of two clusters of its own and trains two steps of a small job over two stages of two
replicas, twice: the first right away (`first job`), the second with the nodes' fork servers surely warm
(`warm job`). Step 0 has begun when the job says `running`. Memory is resident, after two jobs, from one more
round with a process for each entity.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from dmsc import Client
from schemas.job import JobState

SPEC: dict[str, Any] = {
    "name": "readiness",
    "model": {
        "factory": "workers.models.gpt:byte_gpt",
        "args": {"layers": 2, "width": 64, "heads": 4, "context": 64},
    },
    "data": {"source": "stdlib:", "sample_tokens": 64},
    "training": {"steps": 2, "microbatches": 4, "microbatch_samples": 2, "validation_microbatches": 0},
    "parallel": {"stages": 2, "replicas": 2},
}


def until_running_s(client: Client) -> float:
    """Seconds from submitting the job to its first step; waits for its end."""
    began = time.monotonic()
    running_s = None
    submitted = client.submit(SPEC)
    for event in client.events(submitted.job):
        if event.state is JobState.RUNNING and running_s is None:
            running_s = time.monotonic() - began
    record = client.job(submitted.job)
    if running_s is None or record.state is not JobState.DONE:
        sys.exit(f"{record.job} ended {record.state.value}: {record.reason}")
    return running_s


def one_round(folder: Path, *more: str) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds, and MiB by process; `more` are options of `dmsc up`."""
    state = folder / "state"
    command = [sys.executable, "-m", "dmsc"]
    ports = ["--nats-port", "0", "--http-port", "0"]
    began = time.monotonic()
    up = subprocess.run(
        [*command, "up", "--state", str(state), *ports, "--slots", "2", "--detach", "--json", *more],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = {"command": time.monotonic() - began}
    mesh = json.loads(up.stdout)
    seconds["up to ready"] = mesh["ready_at"] - mesh["started_at"]
    try:
        with Client(state=state) as client:
            seconds["first job"] = until_running_s(client)
            seconds["warm job"] = until_running_s(client)
        memory = {
            name: psutil.Process(pid).memory_info().rss / 2**20
            for name, pid in mesh["children"].items()
            if not name.startswith("agent")
        }
    finally:
        subprocess.run([*command, "down", "--state", str(state)], check=True, stdout=subprocess.DEVNULL)
    return seconds, memory


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rounds = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="dmsc-bench-") as folder:
            rounds.append(one_round(Path(folder))[0])
    with tempfile.TemporaryDirectory(prefix="dmsc-bench-") as folder:
        memory = one_round(Path(folder), "--separate")[1]
    seconds = {name: [one[name] for one in rounds] for name in rounds[0]}
    if arguments.json:
        print(json.dumps({"seconds": seconds, "resident_mib": memory}, indent=2))
        return
    for name, values in seconds.items():
        print(f"{name:20} {statistics.median(values):6.2f} s   {min(values):.2f} to {max(values):.2f}")
    for name, value in sorted(memory.items()):
        print(f"{name:20} {value:6.1f} MiB")


if __name__ == "__main__":
    main()
