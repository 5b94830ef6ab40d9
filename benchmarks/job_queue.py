"""The queue's orders on recorded traces, beside first come first served; how long a decision takes.

    python -m benchmarks.job_queue --data ../shared/data [--seed 0] [--rounds 40]

Traces are those of Gavel and Tiresias (`jobs/`), in virtual time, through the orchestrator's own `decide`.
Figures have their bars beside them; one that misses is marked MISSED, and the exit code is 0. The last
sections decide about 10,000 waiting jobs on 10,000 slots, one event after the other: the core alone, and all
that the leader does around it on its loop.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from pathlib import Path

from benchmarks.harness.command import command, say
from benchmarks.harness.emptiness import measuring
from benchmarks.harness.figures import Figure, Sheet, at_most, percentile
from benchmarks.queue_loop import loop_held
from dmsc.simulation.queue.queue_settings import QueueSettings
from dmsc.simulation.queue.trace_files import TraceLine, read_trace
from dmsc.simulation.queue.trace_run import TraceResult, mesh_of, run_trace
from entities.queue.queue_rules import Backfill, QueueOrder, QueueRules
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob, Replicas
from entities.queue.scheduling import QueueSurroundings, decide
from schemas.errors import BadInput

GAVEL = "gavel_msr_seed0/{}.trace"
MAIN = "11cb48"
TRACES: dict[str, tuple[str, dict[str, object]]] = {
    "gavel 0e4a51": (GAVEL.format("0e4a51"), {"slots": 56}),
    "tiresias 60 jobs": ("tiresias/60_job.csv", {"slots": 8}),
}
ELASTIC: dict[str, object] = {"elastic": True, "growth": 0.8}
POLICIES: dict[str, dict[str, object]] = {
    "fcfs": {"backfill": Backfill.NONE},
    "first fit": {"backfill": Backfill.ANY},
    "easy": {},
    "easy, estimates 1–3× too long": {"estimates": (1.0, 3.0)},
    "las": {"order": QueueOrder.LAS},
    "elastic easy": {**ELASTIC, "park": False},
    "elastic las": {**ELASTIC, "order": QueueOrder.LAS},
}


def of_trace(lines: list[TraceLine], seed: int, **settings: object) -> dict[str, TraceResult]:
    """One trace under each policy."""
    found = {}
    for name, policy in POLICIES.items():
        found[name] = result = run_trace(lines, QueueSettings.model_validate({**settings, **policy}), seed)
        say(
            f"{name:30} mean {result.mean_completion_h:8.2f} h, longest wait {result.longest_wait_h:7.1f} h, "
            f"{result.parks:5} parks, {result.resizes:5} changes of size"
        )
    return found


def add(
    sheet: Sheet[Figure], section: str, name: str, value: float, most: float | None, unit: str = ""
) -> None:
    """Notes and prints a figure beside its bar, if it has one."""
    bar, kept = ("", None) if most is None else at_most(value, most)
    figure = Figure(section=section, name=name, value=value, unit=unit, bar=bar, kept=kept)
    sheet.add(figure)
    rest = " ".join(part for part in (unit, bar, figure.verdict) if part)
    print(f"{section}: {name}: {value:.3f} {rest}", flush=True)


def main_trace(sheet: Sheet[Figure], data: Path, seed: int) -> None:
    """The trace that has bars."""
    say(f"gavel {MAIN}, 1,500 jobs, 64 slots")
    found = of_trace(read_trace(data / GAVEL.format(MAIN)), seed, slots=64, jobs=1500)
    mean = {name: result.mean_completion_h for name, result in found.items()}
    wait = {name: result.longest_wait_h for name, result in found.items()}
    section = f"gavel {MAIN}"
    for name, value, most in (
        ("mean completion, EASY ÷ FCFS", mean["easy"] / mean["fcfs"], 1 / 2.3),
        ("mean completion, EASY ÷ first fit", mean["easy"] / mean["first fit"], 1.15),
        ("longest wait, EASY ÷ first fit", wait["easy"] / wait["first fit"], 0.3),
        ("mean completion, elastic LAS ÷ LAS", mean["elastic las"] / mean["las"], 0.80),
    ):
        add(sheet, section, name, value, most)


def decision_times(sheet: Sheet[Figure], order: QueueOrder, seed: int, rounds: int) -> None:
    """10,000 jobs wait on 10,000 slots; jobs end and arrive, and each time it is decided anew."""
    draw = random.Random(seed)
    table = mesh_of(QueueSettings(slots=10_000))
    around = QueueSurroundings(table=table, rules=QueueRules(order=order))
    now, number = 1e6, 0

    def request(replicas: Replicas) -> JobRequest:
        nonlocal number
        number += 1
        tenant, priority = f"tenant-{draw.randrange(20)}", draw.randrange(3)
        return JobRequest(
            job=f"job-{number:06}", submitted_at=now, tenant=tenant, priority=priority, replicas=replicas
        )

    def waiting() -> QueuedJob:
        size = draw.choice((1, 1, 1, 2, 4, 8, 16, 64))
        return QueuedJob(
            request=request(Replicas(least=size, want=size, most=size)),
            since=now,
            work_s=draw.uniform(60, 1e5),
            attained_slot_s=draw.choice((0.0, 0.0, 5e3, 1e5)),
        )

    gc.collect()
    gc.freeze()  # what stays is not looked through again in the middle of a decision
    running: dict[str, ActiveJob] = {}
    queue = {job.request.job: job for job in (waiting() for _ in range(12_000))}
    times_ms = []
    for turn in range(rounds + 10):
        now += 1.0
        began = time.perf_counter()
        decision = decide(list(queue.values()), list(running.values()), around, now)
        took_ms = 1e3 * (time.perf_counter() - began)
        if turn >= 10:  # until then the mesh fills, and those with the weakest claims have made room
            times_ms.append(took_ms)
        for park in decision.parks:
            job = running.pop(park.job)
            queue[park.job] = QueuedJob(
                request=job.request,
                since=now,
                work_s=job.work_s,
                attained_slot_s=job.attained_slot_s,
                parked=True,
            )
        for start in decision.admissions:
            job_waiting = queue.pop(start.job)
            running[start.job] = ActiveJob(
                request=job_waiting.request,
                replicas=start.replicas,
                slots=start.slots,
                started_at=now,
                work_s=job_waiting.work_s,
                attained_slot_s=job_waiting.attained_slot_s,
            )
        for name in draw.sample(sorted(running), min(len(running), draw.randrange(4))):
            del running[name]
        while len(queue) < 10_000:
            job_waiting = waiting()
            queue[job_waiting.request.job] = job_waiting
    value = percentile(times_ms, 0.99)
    say(f"{order}: p50 {percentile(times_ms, 0.5):.1f} ms, {len(running)} jobs run, {len(queue)} wait")
    add(sheet, "10,000 × 10,000", f"a decision, {order}, p99", value, 50.0, "ms")


def main() -> None:
    """Measures and prints."""
    parser = command(
        __doc__,
        as_json=False,
        seed=(0, "of estimates and of the queue that is decided about"),
        rounds=(200, "decisions that are timed"),
        out=(Path("runs/bench-queue.json"), "the file for the figures"),
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="with jobs/")
    arguments = parser.parse_args()
    jobs = arguments.data / "jobs"
    sheet = Sheet[Figure](arguments.out)
    try:
        main_trace(sheet, jobs, arguments.seed)
        for name, (file, settings) in TRACES.items():
            say(f"{name}, {settings['slots']} slots")
            of_trace(read_trace(jobs / file), arguments.seed, **settings)
    except BadInput as error:
        sys.exit(f"{error.text}; --data names the folder that has jobs/")
    for order in QueueOrder:
        decision_times(sheet, order, arguments.seed, arguments.rounds)
    for order in QueueOrder:
        asyncio.run(loop_held(sheet, order, arguments.seed))
    print(sheet.summary, file=sys.stderr)


if __name__ == "__main__":
    with measuring():
        main()
