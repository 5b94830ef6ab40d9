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
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from own_mesh import mesh  # type: ignore[import-not-found,unused-ignore]  # beside this file

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
    spec = {
        "name": "recorded",
        "model": {
            "factory": "workers.models.padded:padded_gpt",
            "args": {"layers": 4, "width": 32, "heads": 2, "context": 32, "pad_ms": 6.0},
        },
        "data": {"source": "stdlib:", "sample_tokens": 32},
        "training": {"steps": steps, "microbatches": 8, "microbatch_samples": 1, "checkpoint_every": 0},
        "parallel": {"stages": 2, "replicas": 2},
        "routing": {"algorithm": "least-outstanding"},
    }
    command = [sys.executable, "-m", "dmsc"]
    file = folder / "run.dmscrun"
    with mesh(folder) as state:
        where = ["--state", str(state)]
        modules = [
            subprocess.Popen(
                [*command, "policy", "run", *what, *where],
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for what in (["service-time-weights"], ["shadow.py", "--shadow"])
        ]
        try:
            with Client(state=state) as client:
                job = client.submit(spec).job
                client.wait(job, timeout_s=300 + steps)
            subprocess.run(
                [*command, "runs", "export", job, str(file), *where],
                check=True,
                cwd=folder,
                stdout=subprocess.DEVNULL,
            )
        finally:
            for module in modules:
                module.terminate()
            for module in modules:
                module.wait()
    return file


def replayed(file: Path, policy: str) -> tuple[float, float, int, int]:
    """(seconds of the run, seconds that it took, messages, suggestions)."""
    session = Session(load_policy(policy))
    began = time.perf_counter()
    story = asyncio.run(feed(session, str(file), None, Archive(file.parent)))
    took_s = time.perf_counter() - began
    return story.until - story.began, took_s, story.messages, len(story.replayed)


def main() -> None:
    parser = argparse.ArgumentParser(description="How much faster than real time a run is replayed.")
    parser.add_argument("--file", type=Path, help="an exported run instead of one of its own")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dmsc-bench-") as folder:
        file = arguments.file or record(Path(folder), arguments.steps)
        with RunFile.open(file) as run:
            header = run.header
        figures = []
        for policy in arguments.policy:
            rounds = [replayed(file, policy) for _ in range(arguments.rounds)]
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
    about = {
        "job": header.job,
        "steps": header.steps,
        "run_s": span_s,
        "messages": messages,
        "file_bytes": size,
    }
    if arguments.json:
        print(json.dumps({**about, "policies": figures}, indent=2))
        return
    print(f"a run of {span_s:.0f} s, {header.steps} steps, {messages:,} messages, {size:,} bytes")
    for one in figures:
        spread = f"({one['lowest']:.0f}–{one['highest']:.0f})"
        print(
            f"{one['policy']:<24} {one['factor']:6.0f}× real time {spread}, "
            f"{one['messages_per_s']:,.0f} messages/s, {one['suggestions']} suggestions"
        )


if __name__ == "__main__":
    main()
