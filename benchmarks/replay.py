"""How much faster than real time a recorded run is replayed.

    python benchmarks/replay.py [--file RUN.dmscrun] [--steps 300] [--rounds 3] [--policy NAME …] [--json]

Without --file a mesh of its own trains a padded job of 2 × 2 instances, with `service-time-weights` beside it
and the same once more in shadow, and its run is exported. Then, per policy, the whole of `dmsc replay`
without the start of Python: reading and checking the file, decoding, the policy, the orchestrator's rules,
scores.

    factor     seconds of the run / seconds of the replay, median over rounds
    messages/s of the record
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.command import bench, command
from benchmarks.harness.jobs import job
from benchmarks.harness.meshes import mesh, new_folder
from benchmarks.harness.processes import DMSC, modules
from bus.recording.run_file import RunFile
from dmsc.client.client import Client
from dmsc.commands.jobs.replay import feed
from dmsc.process.policy_loading import load_policy
from dmsc.replay.recordings import Archive
from dmsc.replay.session import Session

POLICIES = ("service-time-weights", "stage-rebalancing", "examples/my_policy.py")
SHADOW = """
from policies.built_in.service_time_weights import ServiceTimeWeights

class Other(ServiceTimeWeights):
    version = "shadow"
"""


def record(folder: Path, steps: int) -> Path:
    """A run of a mesh's own, exported."""
    (folder / "shadow.py").write_text(SHADOW)
    spec = job(
        "recorded",
        steps=steps,
        layers=4,
        width=32,
        heads=2,
        pad_ms=6.0,
        training={"validation_microbatches": 2},
        replicas=2,
        routing={"algorithm": "least-outstanding"},
    )
    file = folder / "run.dmscrun"
    with mesh(folder) as state, Client(state=state) as client:
        place = ("--state", str(state))
        with modules(folder, ("service-time-weights", *place), ("shadow.py", "--shadow", *place)):
            name = client.submit(spec).job
            client.wait(name, timeout_s=300 + steps)
            command_line = [*DMSC, "runs", "export", name, str(file), *place]
            subprocess.run(command_line, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return file


def replayed(file: Path, policy: str) -> tuple[float, float, int, int]:
    """(seconds of the run, seconds that it took, messages, suggestions)."""
    session = Session(load_policy(policy))
    began = time.perf_counter()
    story = asyncio.run(feed(session, str(file), None, Archive(file.parent)))
    took_s = time.perf_counter() - began
    return story.until - story.began, took_s, story.messages, len(story.replayed)


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"a run of {found['run_s']:.0f} s, {found['steps']} steps, {found['messages']:,} messages, "
        f"{found['file_bytes']:,} bytes"
    )
    for row in found["policies"]:
        between = f"({row['lowest']:.0f}–{row['highest']:.0f})"
        yield (
            f"{row['policy']:<24} {row['factor']:6.0f}× real time {between}, "
            f"{row['messages_per_s']:,.0f} messages/s, {row['suggestions']} suggestions"
        )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with new_folder() as folder:
        file = options.file or record(folder, options.steps)
        with RunFile.open(file) as run:
            header = run.header
        figures = []
        for policy in options.policy:
            rounds = [replayed(file, policy) for _ in range(options.rounds)]
            factors = [span_s / took_s for span_s, took_s, _, _ in rounds]
            span_s, _, messages, suggestions = rounds[0]
            figures.append(
                {
                    "policy": policy,
                    "factor": statistics.median(factors),
                    "lowest": min(factors),
                    "highest": max(factors),
                    "messages_per_s": statistics.median(messages / took_s for _, took_s, _, _ in rounds),
                    "suggestions": suggestions,
                }
            )
        size = file.stat().st_size
    return {
        "job": header.job,
        "steps": header.steps,
        "run_s": span_s,
        "messages": messages,
        "file_bytes": size,
        "policies": figures,
    }


if __name__ == "__main__":
    arguments = command(__doc__, steps=300, rounds=3)
    arguments.add_argument("--file", type=Path, help="an exported run instead of one of its own")
    arguments.add_argument("--policy", nargs="+", default=list(POLICIES))
    bench(arguments, measure, lines)
