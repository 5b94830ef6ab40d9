"""What modules in shadow cost training: steps with and without them, in turn, on the same mesh.

    python benchmarks/shadow_cost.py [--modules 5] [--rounds 3] [--steps 60] [--pad-ms 8] [--json]

A padded job of 2 × 2 instances; each round trains it once without and once with that many modules in shadow,
each a process of its own that takes in all telemetry, decides once a second, and scores itself. Which of the
two comes first changes from round to round.

    cost       median step with / median step without − 1, median over rounds
    cpu        seconds of CPU per second of training that the modules used, all together
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from own_mesh import mesh  # type: ignore[import-not-found,unused-ignore]  # beside this file

from dmsc.client.client import Client

POLICY = """
from policies.built_in.service_time_weights import ServiceTimeWeights

class Shadow(ServiceTimeWeights):
    name = "shadow-{number}"
"""
READY = "module ready"
READY_S = 60.0
FIRST = 5
"""Steps that are left out: links are built, and instances warm up."""


def spec(steps: int, pad_ms: float) -> dict[str, Any]:
    return {
        "name": "shadowed",
        "model": {
            "factory": "workers.models.padded:padded_gpt",
            "args": {"layers": 4, "width": 64, "heads": 4, "context": 32, "pad_ms": pad_ms},
        },
        "data": {"source": "stdlib:", "sample_tokens": 32},
        "training": {
            "steps": steps,
            "microbatches": 8,
            "microbatch_samples": 1,
            "checkpoint_every": 0,
            "validation_microbatches": 0,
        },
        "parallel": {"stages": 2, "replicas": 2},
        "routing": {"algorithm": "least-outstanding"},
    }


@contextmanager
def shadows(folder: Path, state: Path, number: int) -> Iterator[list[psutil.Process]]:
    """So many modules in shadow, ready; gone afterwards."""
    started, logs = [], []
    for index in range(number):
        (folder / f"shadow_{index}.py").write_text(POLICY.format(number=index))
        log = folder / f"shadow_{index}.log"
        command = ["policy", "run", f"shadow_{index}.py", "--shadow", "--state", str(state)]
        with log.open("wb") as out:
            started.append(
                subprocess.Popen([sys.executable, "-m", "dmsc", *command], cwd=folder, stdout=out, stderr=out)
            )
        logs.append(log)
    try:
        deadline = time.monotonic() + READY_S
        while not all(READY in log.read_text() for log in logs):
            if time.monotonic() > deadline:
                raise SystemExit("the modules were not ready: " + logs[0].read_text()[-500:])
            time.sleep(0.1)
        yield [psutil.Process(one.pid) for one in started]
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.wait()


def trained(client: Client, steps: int, pad_ms: float, modules: list[psutil.Process]) -> tuple[float, float]:
    """The median step in seconds, and the modules' CPU seconds per second."""
    began, used = time.perf_counter(), _cpu(modules)
    job = client.submit(spec(steps, pad_ms)).job
    took = [event.result.step_s for event in client.events(job) if event.result is not None]
    cpu = (_cpu(modules) - used) / (time.perf_counter() - began)
    if len(took) != steps:
        raise SystemExit(f"{job} ended after {len(took)} of {steps} steps: {client.job(job).reason}")
    return statistics.median(took[FIRST:]), cpu


def _cpu(modules: list[psutil.Process]) -> float:
    times = [module.cpu_times() for module in modules]
    return sum(one.user + one.system for one in times)


def main() -> None:
    parser = argparse.ArgumentParser(description="What modules in shadow cost training.")
    parser.add_argument("--modules", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pad-ms", type=float, default=8.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    without: list[float] = []
    beside: list[float] = []
    cpu: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dmsc-bench-") as name:
        folder = Path(name)
        with mesh(folder) as state, Client(state=state) as client:
            for number in range(arguments.rounds):
                for shadowed in (False, True) if number % 2 else (True, False):
                    with shadows(folder, state, arguments.modules if shadowed else 0) as modules:
                        step_s, used = trained(client, arguments.steps, arguments.pad_ms, modules)
                    (beside if shadowed else without).append(step_s)
                    cpu += [used] if shadowed else []
    costs = [with_ / alone - 1 for with_, alone in zip(beside, without, strict=True)]
    figures = {
        "modules": arguments.modules,
        "cost": statistics.median(costs),
        "lowest": min(costs),
        "highest": max(costs),
        "step_without_s": statistics.median(without),
        "step_with_s": statistics.median(beside),
        "cpu": statistics.median(cpu),
    }
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    print(
        f"{figures['modules']} modules in shadow: steps of {figures['step_with_s']:.4f} s instead of "
        f"{figures['step_without_s']:.4f} s, {figures['cost']:+.1%} "
        f"({figures['lowest']:+.1%} to {figures['highest']:+.1%}), {figures['cpu']:.2f} cores"
    )


if __name__ == "__main__":
    main()
