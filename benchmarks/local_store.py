"""What an instance's local store costs its event loop, and the machine.

    python benchmarks/local_store.py [--seconds 20] [--step-ms 100] [--json]

An instance's day is replayed without the instance: per step the orders `step prepare` and `step commit` are
obeyed (by handlers that do nothing) and a sample with four links is handed over, as `workers.instance` does.
Without a store the bare handlers are called; the difference of the loop's own CPU time is the cost. The lag
of the loop (how much later than asked a sleep of 2 ms ends) is measured on both sides: the store's thread
holds the interpreter's lock while it commits. Meanwhile one question a second, for 100 events, is answered.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.command import bench, command
from benchmarks.harness.meshes import new_folder
from bus.subjects import STEP_COMMIT, STEP_PREPARE
from schemas.envelope import EntityKind, Envelope, Sender
from schemas.errors import Ack
from schemas.step import Member, StepApplied, StepCommit, StepPrepare
from schemas.store import StoreQuery
from schemas.telemetry import DeviceSample, InstanceSample, LinkSample
from workers.local_store.local_store import LocalStore
from workers.local_store.recorder import StoreRecorder

ME = Member(sid="job-s0-r0", incarnation="i")
SMO = Envelope(
    type="x",
    version=(1, 0),
    id="1",
    sender=Sender(name="orchestrator", kind=EntityKind.ORCHESTRATOR, incarnation="smo"),
    sent_at=0.0,
    body={},
)


async def prepare(order: Any) -> Ack:
    return Ack()


async def commit(order: Any) -> StepApplied:
    return StepApplied(member=ME, version=order.step + 1)


async def day(folder: Path | None, seconds: float, step_s: float, asks: bool) -> dict[str, float]:
    """One side: CPU milliseconds of the event loop's thread for each second, and its lag."""
    lags: list[float] = []
    answers: list[float] = []

    async def pace() -> None:
        while True:
            due = time.perf_counter() + 0.002
            await asyncio.sleep(0.002)
            lags.append((time.perf_counter() - due) * 1e3)

    async def ask(store: LocalStore) -> None:
        while True:
            await asyncio.sleep(1)
            began = time.perf_counter()
            await store.query(StoreQuery(job="job", table="events", newest=True))
            answers.append((time.perf_counter() - began) * 1e3)

    async with LocalStore(folder, ME) as store:
        entries = StoreRecorder(store, 0)
        preparing, committing = entries.audited(STEP_PREPARE, prepare), entries.audited(STEP_COMMIT, commit)
        tasks = [asyncio.create_task(pace())] + ([asyncio.create_task(ask(store))] if asks else [])
        calls_s, cpu = 0.0, time.process_time()
        began = time.perf_counter()
        steps = int(seconds / step_s)
        for step in range(steps):
            first = StepPrepare(job="job", epoch=1, step=step, attempt=0, generation=1)
            then = StepCommit(
                job="job",
                epoch=1,
                step=step,
                attempt=0,
                generation=1,
                checksum="c" * 16,
                clip=1.0,
                action="apply",
            )
            links = tuple(LinkSample(peer=f"s1-r{n}", sent_bytes=1 << 20, transfers=3) for n in range(4))
            sample = InstanceSample(
                job="job",
                sid=ME.sid,
                incarnation="i",
                cluster="a",
                node="n",
                stage=0,
                step=step,
                links=links,
                device=DeviceSample(device="cpu", utilization=0.5, memory_used_bytes=1 << 30),
            )
            at = time.thread_time()
            if folder is None:
                await prepare(first)
                await commit(then)
            else:
                await preparing(first, SMO)
                await committing(then, SMO)
                entries.sample(sample)
                if step % 10 == 0:
                    entries.event("routes", "stage 1 revision 7: job-s1-r0 1, job-s1-r1 2 (service time)")
            calls_s += time.thread_time() - at
            await asyncio.sleep(max(0.0, began + (step + 1) * step_s - time.perf_counter()))
        for task in tasks:
            task.cancel()
        took = time.perf_counter() - began
        used = time.process_time() - cpu
    found = {
        "loop_ms_per_s": calls_s * 1e3 / took,
        "process_ms_per_s": used * 1e3 / took,
        "lag_p50_ms": statistics.median(lags),
        "lag_p99_ms": statistics.quantiles(lags, n=100)[98],
        "threads": float(threading.active_count()),
    }
    if answers:
        found["answer_p50_ms"] = statistics.median(answers)
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with new_folder() as folder:
        path = folder / "store"
        without = asyncio.run(day(None, options.seconds, options.step_ms / 1e3, asks=False))
        within = asyncio.run(day(path, options.seconds, options.step_ms / 1e3, asks=True))
        steps = int(options.seconds * 1e3 / options.step_ms)
        within["bytes_per_step"] = sum(file.stat().st_size for file in path.iterdir()) / steps
    cost = within["loop_ms_per_s"] - without["loop_ms_per_s"]
    return {
        "step_ms": options.step_ms,
        "seconds": options.seconds,
        "without": without,
        "with": within,
        "loop_cost_ms_per_s": cost,
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    without = found["without"]
    yield f"one step each {found['step_ms']:g} ms, {found['seconds']:g} s with and without a store"
    for name, value in found["with"].items():
        before = f"{without[name]:10.3f}" if name in without else " " * 10
        yield f"{name:>18} without {before}   with {value:10.3f}"
    yield f"cost of the event loop: {found['loop_cost_ms_per_s']:.3f} ms in each second"


if __name__ == "__main__":
    arguments = command(
        __doc__, seconds=(20.0, "of each side"), step_ms=(100.0, "one step each so many milliseconds")
    )
    bench(arguments, measure, lines)
