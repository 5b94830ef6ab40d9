"""For how long the leader's loop is held while a job is planned and takes its slots.

Jobs of 1,000 layers with 64 rules each, on 640 slots, as the leader deploys them: in its queue, with their
records on a real bus; only instances are left out. Milliseconds are those that this process computed, in all
threads, until its loop came round; by the clock others of a busy machine count, too.
"""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.harness.loop_watch import watched_loop
from benchmarks.leader_jobs import chain_of_layers, leader_term, queued_record, wide_mesh
from benchmarks.policy_sections.sheet import Bench
from bus.logs import configure_logging
from dmsc.process.serving import tune_interpreter
from schemas.job import JobSpec
from schemas.job_file.plan import MOST_RULES

LAYERS, NODES, SLOTS = 1000, 80, 8
STAGES, REPLICAS = 8, 64
LONGEST_MS = 20.0


def rules() -> dict[str, list[dict[str, Any]]]:
    """Sets of rules that take the planner longest to check."""
    blocks = [f"blocks.{number}.*" for number in range(MOST_RULES + 1)]
    even, odd = "*.[02468]", "*.[13579]"
    each = range(MOST_RULES)
    return {
        "none": [],
        "spread": [{"kind": "spread"} for _ in each],
        "together, of stages": [{"kind": "together", "layers": [blocks[at]]} for at in each],
        "apart, preferred": [
            {"kind": "apart", "scope": "stage", "layers": [even, odd], "hard": False} for _ in each
        ],
        "pins": [
            {"kind": "pin", "layers": [blocks[at]], "cluster": f"cluster-{at // 17}", "hard": False}
            for at in each
        ],
        "memory": [{"kind": "memory", "gib": 0.1 * (at + 1)} for at in each],
        "order": [{"kind": "order", "layers": [blocks[at], blocks[at + 1]]} for at in each],
    }


def run(bench: Bench) -> None:
    """Rows of milliseconds."""
    configure_logging(level="warning")
    tune_interpreter()
    asyncio.run(_planned(bench))


async def _planned(bench: Bench) -> None:
    topology = chain_of_layers(LAYERS)
    async with leader_term(await wide_mesh(NODES, SLOTS), "fcfs") as term:
        for number, (name, constraints) in enumerate(rules().items()):
            spec = JobSpec.model_validate(
                {
                    "name": "planned",
                    "model": {"factory": "models:build"},
                    "training": {"steps": 10, "microbatches": REPLICAS},
                    "parallel": {"stages": STAGES, "replicas": REPLICAS},
                    "plan": {"constraints": constraints},
                }
            )
            job = f"j{number:06}"
            async with watched_loop() as watch:
                term.submit([queued_record(job, spec)], topology)
                while not term.working:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            bench.at_most(
                f"{LAYERS} layers, {STAGES * REPLICAS} units, {len(constraints)} rules: {name}",
                1e3 * watch.own_s,
                LONGEST_MS,
                unit="ms",
                note=f"{1e3 * watch.computed_s:.0f} by the loop, {1e3 * watch.longest_s:.0f} by the clock",
            )
            await term.end(job)
