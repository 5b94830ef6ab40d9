"""For how long the leader's loop is held while 10,000 jobs wait on 10,000 slots.

The orchestrator's own queue, deployments and records on a real bus; only instances are left out. Milliseconds
are those that this process computed, in all threads, until its loop came round; by the clock others of a
busy machine count, too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from benchmarks.harness.command import say
from benchmarks.harness.figures import Figure, Sheet, at_most
from benchmarks.harness.loop_watch import LoopWatch, watched_loop
from benchmarks.leader_jobs import LeaderTerm, chain_of_layers, leader_term, queued_record, wide_mesh
from bus.logs import configure_logging
from dmsc.process.serving import tune_interpreter
from schemas.job import JobSpec

SLOTS_OF_A_NODE = 8
WIDE = 64
"""Slots of each job that runs when the others come."""
SECTION = "10,000 × 10,000, the leader's loop"
LONGEST_MS = 50.0


def spec_of(replicas: int, priority: int = 0) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "waits",
            "model": {"factory": "models:build"},
            "training": {"steps": 1000, "microbatches": WIDE},
            "parallel": {"stages": 1, "replicas": replicas},
            "queue": {"priority": priority},
        }
    )


async def loop_held(sheet: Sheet[Figure], order: str, seed: int, count: int = 10_000) -> None:
    """Fills as many slots as jobs will wait, then lets jobs end and arrive, and asks for the queue."""
    configure_logging(level="warning")
    tune_interpreter()
    draw = random.Random(seed)
    waiting = [spec_of(slots, priority) for slots in (1, 1, 1, 2, 4, 8) for priority in range(3)]
    layers = chain_of_layers(8)
    submitted = 0

    def submit(term: LeaderTerm, specs: list[JobSpec]) -> None:
        nonlocal submitted
        for spec in specs:
            submitted += 1
            record = queued_record(f"j{submitted:06}", spec, f"user-{draw.randrange(20)}")
            term.submit([record], layers)

    async with leader_term(await wide_mesh(count // SLOTS_OF_A_NODE, SLOTS_OF_A_NODE), order) as term:
        wide = count // WIDE
        async with watched_loop() as watch:
            submit(term, [spec_of(WIDE)] * wide)
            await until(lambda: len(term.working) == wide)
        _add(sheet, f"{order}: {wide} jobs of {WIDE} slots are planned and take them", watch)
        async with watched_loop() as watch:
            for _ in range(count // 10):
                submit(term, draw.choices(waiting, k=10))
                await asyncio.sleep(0)
            await until(lambda: all(record.reason for record in term.records.values()))
        _add(sheet, f"{order}: {count:,} jobs arrive and hear why they wait", watch)
        async with watched_loop() as watch:
            told = await term.queue.status(term.records, None)
        _add(sheet, f"{order}: dmsc queue", watch)
        async with watched_loop() as watch:
            await term.queue.status(term.records, told.jobs[len(told.jobs) // 2].job)
        _add(sheet, f"{order}: dmsc queue explain", watch)
        async with watched_loop() as watch:
            for _ in range(5):
                target = len(term.working) + 4
                await term.end(draw.choice(term.working))
                submit(term, draw.choices(waiting, k=3))
                while len(term.working) < target:  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
        _add(sheet, f"{order}: five jobs end, others take their slots", watch)


async def until(reached: Callable[[], bool]) -> None:
    """Looks now and then, which takes a few milliseconds with thousands of jobs."""
    while not reached():  # noqa: ASYNC110
        await asyncio.sleep(0.5)


def _add(sheet: Sheet[Figure], name: str, watch: LoopWatch) -> None:
    value = 1e3 * watch.own_s
    bar, kept = at_most(value, LONGEST_MS)
    note = f"{1e3 * watch.computed_s:.0f} by the loop itself, {1e3 * watch.longest_s:.0f} by the clock"
    figure = Figure(section=SECTION, name=name, value=value, unit="ms", bar=bar, kept=kept, note=note)
    sheet.add(figure)
    say(f"{name}: held for {value:.0f} ms at most {bar} {figure.verdict} ({note})")
