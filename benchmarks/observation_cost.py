"""What watching costs training: telemetry, metrics, scrapes and shipped logs, on and off, in turn.

    python benchmarks/observation_cost.py [--rounds 5] [--steps 60] [--pad-ms 8] [--json]

Two meshes of the same shape, on this machine: in one everything is as it comes (a sample a second and one
after each step, `/metrics` of every process scraped as often as `deploy/observability/prometheus.yml` says,
log lines on the bus), in the other nothing of it (`DMSC_SAMPLE_S=0`, no metrics port, lines of errors alone).
The same padded job of 2 × 2 instances runs in one, then in the other; which comes first changes from round to
round. Each round gives a ratio, and the figures are their medians, with the least and the greatest.

    cpu    CPU seconds of all processes of the mesh, server and instances included, with ÷ without − 1
    step   median step with ÷ median step without − 1

A ratio of CPU has to be read beside what the job computes: the smaller the model, the larger the share of
what is the same for any. `--width` makes it larger.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from own_mesh import mesh  # type: ignore[import-not-found,unused-ignore]  # beside this file

from dmsc.client import Client
from dmsc.state_folder import StateFolder

BAR = 0.01
FIRST = 5
"""Steps that are left out: links are built, and instances warm up."""
OFF = {"DMSC_SAMPLE_S": "0", "DMSC_METRICS_PORT": "off", "DMSC_LOG_SHIP_LEVEL": "error"}
PROMETHEUS = Path(__file__).resolve().parents[1] / "deploy" / "observability" / "prometheus.yml"


@dataclass(frozen=True)
class Cost:
    """One job: seconds of CPU of the whole mesh, and its median step."""

    cpu_s: float
    step_s: float


def spec(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "name": "observed",
        "model": {
            "factory": "workers.models.padded:padded_gpt",
            "args": {
                "layers": 4, "width": arguments.width, "heads": 4, "context": 64, "pad_ms": arguments.pad_ms,
            },
        },
        "data": {"source": "stdlib:", "sample_tokens": 64},
        "training": {
            "steps": arguments.steps, "microbatches": 8, "microbatch_samples": 2, "checkpoint_every": 0,
            "validation_microbatches": 0,
        },
        "parallel": {"stages": 2, "replicas": 2, "segmentation": "uniform"},
        "routing": {"algorithm": "least-outstanding"},
    }  # fmt: skip


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def scraped(urls: list[str]) -> Iterator[None]:
    """Every page as often as Prometheus would ask for it."""
    every_s = float(yaml.safe_load(PROMETHEUS.read_text())["global"]["scrape_interval"].removesuffix("s"))
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(every_s):
            for url in urls:
                with suppress(OSError), urllib.request.urlopen(url, timeout=5) as page:
                    page.read()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def cpu_s(root: psutil.Process) -> float:
    """Of a process and all that it started, those that have ended included."""
    found = 0.0
    for one in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found


def trained(state: Path, arguments: argparse.Namespace) -> Cost:
    file = StateFolder(state).mesh()
    assert file is not None
    root = psutil.Process(file.pid)
    with Client(state=state) as client, scraped(list(file.metrics.values())):
        before = cpu_s(root)
        job = client.submit(spec(arguments)).job
        took = [event.result.step_s for event in client.events(job) if event.result is not None]
        used = cpu_s(root) - before
    if len(took) != arguments.steps:
        raise SystemExit(f"{job} ended after {len(took)} of {arguments.steps} steps")
    return Cost(used, statistics.median(took[FIRST:]))


def ratios(pairs: list[tuple[float, float]]) -> dict[str, float]:
    found = [on / off - 1 for on, off in pairs]
    return {"median": statistics.median(found), "least": min(found), "greatest": max(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description="What watching costs training.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pad-ms", type=float, default=8.0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    costs: dict[str, list[Cost]] = {"on": [], "off": []}
    with ExitStack() as stack:
        states: dict[str, Path] = {}
        for kind, values in (("on", {}), ("off", OFF)):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dmsc-bench-"))
            with environment(**values):
                states[kind] = stack.enter_context(mesh(Path(folder)))
        for state in states.values():
            trained(state, arguments)  # code is compiled, servers are warm
        for number in range(arguments.rounds):
            for kind in ("on", "off") if number % 2 else ("off", "on"):
                costs[kind].append(trained(states[kind], arguments))
    pairs = list(zip(costs["on"], costs["off"], strict=True))
    figures = {
        "cpu": ratios([(on.cpu_s, off.cpu_s) for on, off in pairs]),
        "step": ratios([(on.step_s, off.step_s) for on, off in pairs]),
        "cpu_on_s": statistics.median(one.cpu_s for one in costs["on"]),
        "cpu_off_s": statistics.median(one.cpu_s for one in costs["off"]),
        "step_on_s": statistics.median(one.step_s for one in costs["on"]),
        "step_off_s": statistics.median(one.step_s for one in costs["off"]),
        "rounds": arguments.rounds,
    }
    if arguments.json:
        json.dump(figures, sys.stdout, indent=2)
        return
    for name, unit in (("cpu", "s of CPU"), ("step", "s a step")):
        row: Any = figures[name]
        print(
            f"{name:5} {row['median']:+.1%} ({row['least']:+.1%} to {row['greatest']:+.1%}) of "
            f"{figures[f'{name}_off_s']:.3f} {unit}; bar: ≤ {BAR:.0%}"
        )


if __name__ == "__main__":
    main()
