"""What watching costs training: telemetry, metrics, scrapes, logs and a dashboard, with and without, at once.

    python benchmarks/observation_cost.py [--rounds 8] [--steps 60] [--pad-ms 12] [--json]

Two meshes of the same shape, on this machine: in one everything is as it comes (a sample a second and one
after each step, `/metrics` of every process scraped as often as `deploy/observability/prometheus.yml` says,
log lines on the bus) and somebody looks at the dashboard (its stream is read); in the other nothing of it
(`DMSC_SAMPLE_S=0`, no metrics port, lines of errors alone). The same job of 2 × 2 instances runs in both at
once, round after round: whatever else the machine does, it does to both. Its blocks wait for emulated
devices and compute next to nothing, so that two cores suffice and what is measured is not lost in it.
The figures are medians of rounds, with the quartiles and the extremes.

    step       median step with ÷ median step without − 1
    instances  CPU time of the job's instances, by /proc: with − without, of each of them, in per cent of one
               core. An instance that keeps a core busy loses that part of its speed; one that waits for a
               device nothing
    mesh       the same of all processes together, and of each kind: the server carries samples, logs and what
               is shown; routers and gateways read them
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.harness.command import bench, command, say
from benchmarks.harness.jobs import job
from benchmarks.harness.meshes import mesh
from benchmarks.step_cost import processes
from dmsc.client.client import Client
from dmsc.state.state_folder import StateFolder

BAR = 0.01
FIRST = 5
"""Steps that are left out: links are built, and instances warm up."""
OFF = {"DMSC_SAMPLE_S": "0", "DMSC_METRICS_PORT": "off", "DMSC_LOG_SHIP_LEVEL": "error"}
PROMETHEUS = Path(__file__).resolve().parents[1] / "deploy" / "observability" / "prometheus.yml"


@dataclass(frozen=True, slots=True)
class Cost:
    """One job: its median step, and CPU seconds per second of its mesh's processes by what they are."""

    step_ms: float
    cores: dict[str, float]
    count: int  # of instances, those included that make data

    @property
    def instances(self) -> float:
        """Of each."""
        return self.cores["instances"] / self.count

    @property
    def mesh(self) -> float:
        return sum(self.cores.values())


def spec(options: argparse.Namespace) -> dict[str, Any]:
    return job(
        "observed",
        steps=FIRST + options.steps + 2,
        samples=2,
        layers=4,
        width=32,
        heads=2,
        context=16,
        pad_ms=options.pad_ms,
        replicas=2,
        parallel={"segmentation": "uniform"},
        routing={"algorithm": "round-robin"},  # which no sample changes
    )


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
    request = urllib.request.Request(f"{url}/v1/live", headers={"Authorization": f"Bearer {token}"})

    def work(ended: threading.Event) -> None:
        with urllib.request.urlopen(request, timeout=60) as stream:
            while not ended.is_set() and stream.readline():
                pass

    return work


def used_s(kinds: dict[int, str]) -> dict[str, float]:
    """CPU seconds of these processes so far, by kind."""
    found: defaultdict[str, float] = defaultdict(float)
    for pid, kind in kinds.items():
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            found[kind] += times.user + times.system
    return found


def kinds_of(state: Path, job: str, root: int) -> dict[int, str]:
    """The mesh's processes by kind."""
    names = processes(state, job)
    found = {}
    for one in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            name = names.get(one.pid, "fork servers")
            found[one.pid] = "instances" if name == "data" or name.startswith("stage") else name
    return found


def trained(state: Path, observed: bool, options: argparse.Namespace) -> Cost:
    folder = StateFolder(state)
    file, token = folder.mesh(), folder.token()
    assert file is not None
    assert token is not None
    with ExitStack() as stack:
        client = stack.enter_context(Client(state=state))
        if observed:
            stack.enter_context(beside(scraped(list(file.metrics.values()))))
            stack.enter_context(beside(watched(next(iter(file.gateways.values())), token)))
        name = client.submit(spec(options)).job
        took: list[float] = []
        kinds: dict[int, str] = {}
        before: dict[str, float] = {}
        after: dict[str, float] = {}
        for event in client.events(name):
            if event.result is None:
                continue
            if event.result.step == FIRST:
                kinds = kinds_of(state, name, file.pid)
                before = used_s(kinds)
            elif FIRST < event.result.step <= FIRST + options.steps:
                took.append(event.result.step_s)
                if len(took) == options.steps:
                    after = used_s(kinds)
    if len(took) != options.steps:
        raise SystemExit(f"{name} ended after {len(took)} of {options.steps} steps")
    cores = {kind: (after[kind] - before[kind]) / sum(took) for kind in after}
    return Cost(1e3 * statistics.median(took), cores, list(kinds.values()).count("instances"))


def quartiles(found: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else [*found] * 3
    return {"median": middle, "low": low, "high": high, "least": min(found), "greatest": max(found)}


def lines(figures: dict[str, Any]) -> Iterator[str]:
    without = figures["without"]
    for name, meaning in (
        ("step", f"of {without['step_ms']:.0f} ms; bar: ≤ {BAR:.0%}"),
        ("instances", f"of a core, each, beside {without['instances']:.1%}; bar: ≤ {BAR:.0%}"),
        ("mesh", f"of a core, all processes together, beside {without['mesh']:.1%}"),
    ):
        row = figures[name]
        yield (
            f"{name:10} {row['median']:+.2%} (quartiles {row['low']:+.2%} to {row['high']:+.2%}, all "
            f"{row['least']:+.2%} to {row['greatest']:+.2%}) {meaning}"
        )
    for kind, cores in sorted(figures["by_kind"].items(), key=lambda item: -item[1]):
        yield f"  {kind:24} {cores:+.2%}"
    yield f"{figures['rounds']} rounds; load average {figures['load_average']:.1f}"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    pairs: list[tuple[Cost, Cost]] = []
    with ExitStack() as stack:
        states = [stack.enter_context(mesh(environment=values)) for values in ({}, OFF)]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        for number in range(-1, options.rounds):
            jobs = [pool.submit(trained, state, state is states[0], options) for state in states]
            on, off = (job.result() for job in jobs)
            if number >= 0:  # before, code was compiled and servers got warm
                pairs.append((on, off))
                costs = (
                    f"{cost.step_ms:.0f} ms, {cost.instances:.2%}, {cost.mesh:.1%}" for cost in (on, off)
                )
                say(f"round {number + 1}: with {', without '.join(costs)}")
    names = ("step_ms", "instances", "mesh")
    return {
        "rounds": options.rounds,
        "load_average": os.getloadavg()[0],
        "step": quartiles([on.step_ms / off.step_ms - 1 for on, off in pairs]),
        "instances": quartiles([on.instances - off.instances for on, off in pairs]),
        "mesh": quartiles([on.mesh - off.mesh for on, off in pairs]),
        "without": {name: statistics.median(getattr(off, name) for _, off in pairs) for name in names},
        "by_kind": {
            kind: statistics.median(on.cores.get(kind, 0.0) - off.cores.get(kind, 0.0) for on, off in pairs)
            for kind in pairs[0][0].cores
        },
    }


if __name__ == "__main__":
    bench(command(__doc__, rounds=8, steps=60, pad_ms=12.0), measure, lines)
