"""What watching costs training: telemetry, metrics, scrapes, logs and a dashboard, on and off, in turn.

    python benchmarks/observation_cost.py [--rounds 12] [--steps 60] [--pad-ms 12] [--json]

Two meshes of the same shape, on this machine: in one everything is as it comes (a sample a second and one
after each step, `/metrics` of every process scraped as often as `deploy/observability/prometheus.yml` says,
log lines on the bus) and somebody looks at the dashboard (its stream is read); in the other nothing of it
(`DMSC_SAMPLE_S=0`, no metrics port, lines of errors alone). The same padded job of 2 × 2 instances runs in
one, then in the other; which comes first changes from round to round. Each round gives ratios; the figures
are their medians, with the quartiles and the extremes.

    step       median step with ÷ median step without − 1. Blocks wait for emulated devices, so that this
               machine's cores are not what is measured
    instances  CPU seconds per step of the job's instances, from /proc, with ÷ without − 1. What training
               pays; it depends little on who else wants the cores
    mesh       the same of all processes of the mesh, server, gateways and routers included, which have
               machines of their own where that matters

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from own_mesh import mesh  # type: ignore[import-not-found,unused-ignore]  # beside this file
from step_cost import processes  # type: ignore[import-not-found,unused-ignore]  # beside this file

from dmsc.client import Client
from dmsc.state_folder import StateFolder

BAR = 0.01
FIRST = 5
"""Steps that are left out: links are built, and instances warm up."""
OFF = {"DMSC_SAMPLE_S": "0", "DMSC_METRICS_PORT": "off", "DMSC_LOG_SHIP_LEVEL": "error"}
PROMETHEUS = Path(__file__).resolve().parents[1] / "deploy" / "observability" / "prometheus.yml"


@dataclass(frozen=True)
class Cost:
    """One job: milliseconds of CPU per step of its instances and of the whole mesh, and its median step."""

    step_ms: float
    instances_ms: float
    mesh_ms: float


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
            "steps": FIRST + arguments.steps + 2, "microbatches": 8, "microbatch_samples": 2,
            "checkpoint_every": 0, "validation_microbatches": 0,
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
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Something that goes on in a thread until the end of the block."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def scraped(urls: Sequence[str]) -> Callable[[threading.Event], None]:
    """Every page as often as Prometheus would ask for it."""
    every_s = float(yaml.safe_load(PROMETHEUS.read_text())["global"]["scrape_interval"].removesuffix("s"))

    def work(ended: threading.Event) -> None:
        while not ended.wait(every_s):
            for url in urls:
                with suppress(OSError), urllib.request.urlopen(url, timeout=5) as page:
                    page.read()

    return work


def watched(url: str, token: str) -> Callable[[threading.Event], None]:
    """The stream that a dashboard reads; something comes four times a second."""
    asked = urllib.request.Request(f"{url}/v1/live", headers={"Authorization": f"Bearer {token}"})

    def work(ended: threading.Event) -> None:
        with urllib.request.urlopen(asked, timeout=60) as stream:
            while not ended.is_set() and stream.readline():
                pass

    return work


def used_s(pids: Sequence[int]) -> float:
    """Of living processes, those included that they started and that have ended."""
    found = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            found += times.user + times.system + times.children_user + times.children_system
    return found


def trained(state: Path, observed: bool, arguments: argparse.Namespace) -> Cost:
    folder = StateFolder(state)
    file, token = folder.mesh(), folder.token()
    assert file is not None
    assert token is not None
    with ExitStack() as stack:
        client = stack.enter_context(Client(state=state))
        if observed:
            stack.enter_context(beside(scraped(list(file.metrics.values()))))
            stack.enter_context(beside(watched(next(iter(file.gateways.values())), token)))
        job = client.submit(spec(arguments)).job
        took: list[float] = []
        instances: list[int] = []
        whole: list[int] = []
        before = after = (0.0, 0.0)
        for event in client.events(job):
            if event.result is None:
                continue
            if event.result.step == FIRST:
                root = psutil.Process(file.pid)
                whole = [root.pid, *(one.pid for one in root.children(recursive=True))]
                named = processes(state, job)
                instances = [pid for pid, what in named.items() if what == "data" or what.startswith("stage")]
                before = used_s(instances), used_s(whole)
            elif FIRST < event.result.step <= FIRST + arguments.steps:
                took.append(event.result.step_s)
                if len(took) == arguments.steps:
                    after = used_s(instances), used_s(whole)
    if len(took) != arguments.steps:
        raise SystemExit(f"{job} ended after {len(took)} of {arguments.steps} steps")
    per_step = [1e3 * (late - early) / arguments.steps for early, late in zip(before, after, strict=True)]
    return Cost(1e3 * statistics.median(took), *per_step)


def ratios(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    found = sorted(on / off - 1 for on, off in pairs)
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    return {"median": middle, "low": low, "high": high, "least": found[0], "greatest": found[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description="What watching costs training.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pad-ms", type=float, default=12.0)
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
        for kind, state in states.items():
            trained(state, kind == "on", arguments)  # code is compiled, servers are warm
        for number in range(arguments.rounds):
            for kind in ("on", "off") if number % 2 else ("off", "on"):
                costs[kind].append(trained(states[kind], kind == "on", arguments))
            print(f"round {number + 1}: on {costs['on'][-1]}, off {costs['off'][-1]}", file=sys.stderr)
    pairs = list(zip(costs["on"], costs["off"], strict=True))
    figures: dict[str, Any] = {"rounds": arguments.rounds}
    for name in ("step", "instances", "mesh"):
        both = [(getattr(on, f"{name}_ms"), getattr(off, f"{name}_ms")) for on, off in pairs]
        figures[name] = ratios(both)
        figures[f"{name}_on_ms"] = statistics.median(on for on, _ in both)
        figures[f"{name}_off_ms"] = statistics.median(off for _, off in both)
    figures["load_average"] = os.getloadavg()[0]
    if arguments.json:
        json.dump(figures, sys.stdout, indent=2)
        return
    for name, unit in (("step", "ms a step"), ("instances", "CPU ms a step"), ("mesh", "CPU ms a step")):
        row: Any = figures[name]
        bar = "" if name == "mesh" else f"; bar: ≤ {BAR:.0%}"
        print(
            f"{name:10} {row['median']:+.1%} (quartiles {row['low']:+.1%} to {row['high']:+.1%}, all "
            f"{row['least']:+.1%} to {row['greatest']:+.1%}) of {figures[f'{name}_off_ms']:.1f} {unit}{bar}"
        )
    print(f"{arguments.rounds} rounds; load average {figures['load_average']:.1f}")


if __name__ == "__main__":
    main()
