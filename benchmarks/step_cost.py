"""Processor time that a training step takes, by process, of a mesh of its own.

    python benchmarks/step_cost.py [--steps 60] [--stages 2] [--replicas 2] [--float-sums] [--json]

CPU time depends much less on what else the machine does than wall time (caches and the halves of a core
are shared), so that two runs can be compared on a busy machine. What a process does per second and not per
step (heartbeats, samples, gloo's loop, which looks 100 times a second) is in it: steps that take longer cost
more. Each block of the model waits (`--pad-ms`), as for a device; what it computes is in the figures, too.

    CPU ms     user and system time between the commits of two steps ÷ the steps between them
    faults     pages that the kernel had to give it
    switches   times that its threads went to sleep; each is a wake-up later
    threads    CPU ms of the stage instances: their event loops, gloo's threads, and by instance all others
               together, which are the one that computes, the links' and the local store's
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.command import bench, command
from benchmarks.harness.jobs import job
from benchmarks.harness.meshes import mesh
from dmsc.client.client import Client
from dmsc.state.state_folder import StateFolder

FIRST = 8
"""Steps that are left out: links are built, and instances warm up."""
MICROBATCHES = 8


def spec(options: argparse.Namespace) -> dict[str, Any]:
    """The job: what it computes per parameter weighs more than what it computes per token."""
    return job(
        "cost",
        steps=FIRST + options.steps + 2,
        microbatches=MICROBATCHES,
        samples=2,
        layers=6,
        width=options.width,
        heads=8,
        context=8,
        pad_ms=options.pad_ms,
        training={"exact_accumulation": not options.float_sums},
        stages=options.stages,
        replicas=options.replicas,
    )


def processes(state: Path, name_of_job: str) -> dict[int, str]:
    """The mesh's processes by what they are."""
    file = StateFolder(state).mesh()
    assert file is not None
    found = {file.pid: "dmsc up"} | {pid: name for name, pid in file.children.items()}
    for process in psutil.Process(file.pid).children(recursive=True):
        if process.pid in found:
            continue
        name = Path(f"/proc/{process.pid}/comm").read_text().strip()
        kind = re.match(r"data|s(\d+)", name.removeprefix(name_of_job).lstrip("-"))
        if kind is not None:  # not the fork servers, which only wait
            found[process.pid] = f"stage {kind[1]}" if kind[1] else "data"
    return found


@dataclass(frozen=True, slots=True)
class Used:
    """What a process has used so far, or between two moments."""

    user_ms: float = 0.0
    system_ms: float = 0.0
    faults: int = 0  # pages that the kernel had to give it
    switches: int = 0  # times that its threads went to sleep: each is a wake-up later

    def __add__(self, other: Used) -> Used:
        return Used(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __sub__(self, other: Used) -> Used:
        return Used(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))


def used(pid: int) -> Used:
    process = psutil.Process(pid)
    times = process.cpu_times()
    faults = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[7])
    switches = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.MULTILINE)
            switches += int(found[1]) if found else 0
    return Used(times.user * 1e3, times.system * 1e3, faults, switches)


def threads_ms(pid: int) -> dict[tuple[int, str], float]:
    """Milliseconds of each living thread: its name without its number."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = "event loop" if task.name == str(pid) else (task / "comm").read_text().strip()
        found[int(task.name), name] = int((task / "schedstat").read_text().split()[0]) / 1e6
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the job once; CPU milliseconds per step, by process and by kind of thread."""
    with mesh() as state, Client(state=state) as client:
        name = client.submit(spec(options)).job
        known: dict[int, str] = {}
        before: dict[int, Used] = {}
        threads_before: dict[int, dict[tuple[int, str], float]] = {}
        began = ended = 0.0
        total: defaultdict[str, Used] = defaultdict(Used)
        threads: defaultdict[str, float] = defaultdict(float)
        for event in client.events(name):
            if event.kind != "step" or event.result is None:
                continue
            if event.result.step == FIRST:
                known = processes(state, name)
                stages = [pid for pid, what in known.items() if what.startswith("stage")]
                before = {pid: used(pid) for pid in known}
                threads_before = {pid: threads_ms(pid) for pid in stages}
                began = event.at
            elif event.result.step == FIRST + options.steps:
                for pid, what in known.items():
                    total[what] += used(pid) - before[pid]
                for pid, earlier in threads_before.items():
                    for key, moment in threads_ms(pid).items():
                        threads[key[1]] += moment - earlier.get(key, 0.0)
                ended = event.at
        record = client.job(name)
    if not ended:
        sys.exit(f"{name} ended {record.state.value} too early: {record.reason}")
    count = options.steps
    return {
        "step_s": (ended - began) / count,
        "processes": {
            what: {
                "user_ms": one.user_ms / count,
                "system_ms": one.system_ms / count,
                "faults": one.faults / count,
                "switches": one.switches / count,
            }
            for what, one in sorted(total.items(), key=lambda item: -item[1].user_ms)
        },
        "threads_ms": {
            what: value / count for what, value in sorted(threads.items()) if value / count > 0.05
        },
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    columns = ("user_ms", "system_ms", "faults", "switches")
    yield f"{'per step':20} {'CPU ms':>9} {'user':>9} {'system':>9} {'faults':>9} {'switches':>9}"
    rows = dict(found["processes"])
    rows["together"] = {name: sum(row[name] for row in found["processes"].values()) for name in columns}
    for process, row in rows.items():
        values = (row["user_ms"] + row["system_ms"], *(row[name] for name in columns))
        yield f"{process:20} " + " ".join(f"{value:9.1f}" for value in values)
    yield f"a step takes {found['step_s']:.3f} s; CPU ms of the stage instances by thread:"
    for thread, value in found["threads_ms"].items():
        yield f"  {thread:18} {value:9.1f}"


if __name__ == "__main__":
    bench(
        command(
            __doc__,
            steps=60,
            stages=2,
            replicas=2,
            width=(256, "256: 2.4 million parameters a stage of two"),
            pad_ms=8.0,
            float_sums=False,
        ),
        measure,
        lines,
    )
