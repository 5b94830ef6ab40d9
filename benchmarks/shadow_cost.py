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
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.command import bench, command
from benchmarks.harness.jobs import job, step_times
from benchmarks.harness.meshes import mesh, new_folder
from benchmarks.harness.processes import modules, turns
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
    return job(
        "shadowed",
        steps=steps,
        layers=4,
        width=64,
        pad_ms=pad_ms,
        replicas=2,
        routing={"algorithm": "least-outstanding"},
    )


@contextmanager
def shadows(folder: Path, state: Path, number: int) -> Iterator[list[psutil.Process]]:
    """So many modules in shadow, ready; gone afterwards."""
    names = [f"shadow_{index}.py" for index in range(number)]
    for index, name in enumerate(names):
        (folder / name).write_text(POLICY.format(number=index))
    log = folder / "shadows.log"
    log.write_text("")
    commands = [(name, "--shadow", "--state", str(state)) for name in names]
    with modules(folder, *commands, log=log) as started:
        deadline = time.monotonic() + READY_S
        while log.read_text().count(READY) < number:
            if time.monotonic() > deadline:
                raise SystemExit("the modules were not ready: " + log.read_text()[-500:])
            time.sleep(0.1)
        yield [psutil.Process(process.pid) for process in started]


def trained(
    client: Client, steps: int, pad_ms: float, processes: list[psutil.Process]
) -> tuple[float, float]:
    """The median step in seconds, and the modules' CPU seconds per second."""
    began, used = time.perf_counter(), _cpu(processes)
    name = client.submit(spec(steps, pad_ms)).job
    took = step_times(client, name)
    cpu = (_cpu(processes) - used) / (time.perf_counter() - began)
    if len(took) != steps:
        raise SystemExit(f"{name} ended after {len(took)} of {steps} steps: {client.job(name).reason}")
    return statistics.median(took[FIRST:]), cpu


def _cpu(modules: list[psutil.Process]) -> float:
    times = [module.cpu_times() for module in modules]
    return sum(one.user + one.system for one in times)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    step_s: dict[bool, list[float]] = {False: [], True: []}
    cpu: list[float] = []
    with new_folder() as folder, mesh(folder) as state, Client(state=state) as client:
        for _, shadowed in turns((True, False), options.rounds):
            with shadows(folder, state, options.modules if shadowed else 0) as processes:
                median_s, used = trained(client, options.steps, options.pad_ms, processes)
            step_s[shadowed].append(median_s)
            cpu += [used] if shadowed else []
    costs = [beside / alone - 1 for beside, alone in zip(step_s[True], step_s[False], strict=True)]
    return {
        "modules": options.modules,
        "cost": statistics.median(costs),
        "lowest": min(costs),
        "highest": max(costs),
        "step_without_s": statistics.median(step_s[False]),
        "step_with_s": statistics.median(step_s[True]),
        "cpu": statistics.median(cpu),
    }


def lines(figures: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{figures['modules']} modules in shadow: steps of {figures['step_with_s']:.4f} s instead of "
        f"{figures['step_without_s']:.4f} s, {figures['cost']:+.1%} "
        f"({figures['lowest']:+.1%} to {figures['highest']:+.1%}), {figures['cpu']:.2f} cores"
    )


if __name__ == "__main__":
    bench(command(__doc__, modules=5, rounds=3, steps=60, pad_ms=8.0), measure, lines)
