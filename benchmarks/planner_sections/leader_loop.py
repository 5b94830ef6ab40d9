"""For how long the leader's loop is held while a job is planned and takes its slots.

Jobs of 1,000 layers with 64 rules each, on 640 slots, as the leader deploys them: in its queue, with their
records on a real bus; only instances are left out. Then the shape of such a job is chosen, and a plan is
asked for as `POST /v1/plans` does it: the gateway's part (the body is parsed, the question sent) and the
leader's (it is heard, planned and answered) are on one loop here, so the figure is above either.
Milliseconds are those that this process computed, in all threads, until its loop came round; by the clock
others of a busy machine count, too.
"""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.harness.emptiness import some
from benchmarks.harness.loop_watch import LoopWatch, watched_loop
from benchmarks.leader_jobs import LeaderTerm, chain_of_layers, leader_term, queued_record, wide_mesh
from benchmarks.policy_sections.sheet import Bench
from bus.logs import configure_logging
from bus.subjects import MAKE_PLAN
from dmsc.process.serving import tune_interpreter
from entities.gateway.http.requests import parse
from entities.orchestrator.planning.shape_choice import with_shape
from entities.orchestrator.queue.plan_service import PlanService
from schemas.errors import BadJob
from schemas.job import JobSpec
from schemas.job_file.plan import MOST_RULES
from schemas.plans import MakePlan, MeasuredModel, PlanBody, planned_job
from schemas.task_graph import ModelTopology

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
            spec = _spec({"stages": STAGES, "replicas": REPLICAS}, constraints)
            job = f"j{number:06}"
            async with watched_loop() as watch:
                term.submit([queued_record(job, spec)], topology)
                while not term.working:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            rows = f"{LAYERS} layers, {STAGES * REPLICAS} units, {len(constraints)} rules: {name}"
            _add(bench, rows, watch)
            await term.end(job)
        await _shape_chosen(bench, term, topology)
        await _plan_asked(bench, term, topology)


async def _shape_chosen(bench: Bench, term: LeaderTerm, topology: ModelTopology) -> None:
    """Stages and replicas are `auto`."""
    spec = _spec({"stages": "auto", "replicas": "auto", "slots": STAGES * REPLICAS}, [])
    async with watched_loop() as watch:
        chosen, _ = await with_shape(spec, topology, term.mesh.open_nodes())
    some(chosen.parallel.replicas_per_stage(), "stages of the chosen shape")
    _add(bench, f"{LAYERS} layers, {STAGES * REPLICAS} slots: auto stages", watch)


async def _plan_asked(bench: Bench, term: LeaderTerm, topology: ModelTopology) -> None:
    """A question about a model that its user has measured."""
    plans = PlanService(term.bus, term.mesh, lambda _: None, dict)
    await term.bus.serve(MAKE_PLAN, plans.make)
    body = PlanBody(job=_spec({"stages": STAGES, "replicas": REPLICAS}, []), model=MeasuredModel.of(topology))
    text = body.model_dump_json(exclude_unset=True).encode()
    async with watched_loop() as watch:
        question = parse(PlanBody, text, BadJob)
        asked = question.model_copy(update={"job": planned_job(question.job)})
        made = await term.bus.command(MAKE_PLAN, MakePlan(question=asked, user="rita"), deadline_s=60.0)
    some(made.stages, "stages of the plan")
    _add(bench, f"{LAYERS} layers, {STAGES * REPLICAS} units: POST /v1/plans, {len(text) >> 10} KiB", watch)


def _spec(parallel: dict[str, Any], constraints: list[dict[str, Any]]) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "planned",
            "model": {"factory": "models:build"},
            "training": {"steps": 10, "microbatches": REPLICAS},
            "parallel": parallel,
            "plan": {"constraints": constraints},
        }
    )


def _add(bench: Bench, name: str, watch: LoopWatch) -> None:
    bench.at_most(
        name,
        1e3 * watch.own_s,
        LONGEST_MS,
        unit="ms",
        note=f"{1e3 * watch.computed_s:.0f} by the loop, {1e3 * watch.longest_s:.0f} by the clock",
    )
