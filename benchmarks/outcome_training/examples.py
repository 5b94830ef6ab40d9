"""Examples: what a module sees of a job at a moment, beside what came of one change, made and not made."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.outcome_training.disturbances import DisturbedJob, disturbed_job
from benchmarks.outcome_training.simulated_mesh import SimulatedMesh
from dmsc.simulation.scenarios.scenario import Migration
from policies.built_in.change_outcomes import measured_job, step_now_s
from policies.kit.engine import Event
from policies.kit.view import Observations
from policies.numerics.allocation.change_graphs import (
    CandidateChange,
    MeasuredJob,
    change_graphs,
    doubt_about,
)
from policies.numerics.allocation.outcome_network import ChangeGraphs, untrained

HORIZON_S = untrained().horizon_s
MOMENTS, CHANGES = 4, 3
"""Of a job, and of a moment, at most."""
EARLIEST_S = 6.0
SETTLE_STEPS, CHECK_STEPS = 2, 8
"""As the orchestrator's account judges a change."""


@dataclass(frozen=True)
class Example:
    """One change of one job: its graph (one candidate), and logarithms of what came of it."""

    graphs: ChangeGraphs
    gain: float
    step: float
    seed: int
    kind: str
    formula: float


def examples_of(seed: int) -> Iterator[Example]:
    """The examples of one seed; none where nothing seemed worth a change."""
    draw = random.Random(f"examples {seed}")
    moments = sorted(_moments(draw, disturbed_job(seed)))
    disturbed = disturbed_job(seed, lasts_s=moments[-1] + HORIZON_S + 0.5)
    seen: list[MeasuredJob | None] = []
    observations = Observations()

    def hears(event: Event) -> None:
        while len(seen) < len(moments) and event.at > moments[len(seen)]:
            view = observations.jobs.get("j")
            job = None if view is None else measured_job(view, moments[len(seen)])
            seen.append(None if job is None else replace(job, work=_misjudged(draw, job.work)))
        observations.take(event.message, event.at, id=event.id)

    left_alone = SimulatedMesh(disturbed, hears)
    left_alone.run()
    for moment, job in zip(moments, seen, strict=False):
        if job is None or doubt_about(job):
            continue
        candidates, graphs = change_graphs(job)
        order = sorted(range(len(candidates)), key=lambda place: -candidates[place].saves)
        chosen = order[:1] + draw.sample(order[1:], min(CHANGES - 1, len(order) - 1)) if order else []
        for place in chosen:
            found = _outcome(disturbed, left_alone, job, candidates[place], moment)
            if found is not None:
                one = ChangeGraphs(
                    graphs.nodes,
                    graphs.stages,
                    graphs.marks[place : place + 1],
                    graphs.job[place : place + 1],
                )
                yield Example(one, *found, seed, disturbed.kind, float(graphs.job[place, 1]))


def _moments(draw: random.Random, disturbed: DisturbedJob) -> list[float]:
    """Mostly soon after something has begun."""
    begins = disturbed.begins_s
    return [
        max(EARLIEST_S, begins + math.exp(draw.uniform(math.log(0.5), math.log(20))))
        if draw.random() < 0.8
        else draw.uniform(EARLIEST_S, 40.0)
        for _ in range(MOMENTS)
    ]


def _misjudged(draw: random.Random, work: tuple[float, ...]) -> tuple[float, ...]:
    """What a plan says: its analysis timed the layers once, on another machine."""
    if draw.random() < 0.2:
        return tuple(0.0 for _ in work)
    return tuple(each * math.exp(draw.gauss(0, 0.08)) for each in work)


def _outcome(
    disturbed: DisturbedJob,
    left_alone: SimulatedMesh,
    job: MeasuredJob,
    candidate: CandidateChange,
    at_s: float,
) -> tuple[float, float] | None:
    """Logarithms of the gain within the horizon and of the step afterwards; None: it had no effect."""
    sid = job.sids[candidate.node]
    stage = None if candidate.migrates else candidate.stage
    speed = job.room_speed
    if stage is not None:
        speed = left_alone.job.by_sid[sid].speed  # type: ignore[attr-defined]
    change = Migration(at_s=at_s + 0.05, target=sid, speed=speed, stage=stage)
    scenario = disturbed.scenario.model_copy(update={"limit_s": at_s + HORIZON_S + 0.5})
    changed = SimulatedMesh(replace(disturbed, scenario=scenario), None, (change,))
    changed.run()
    alone = left_alone.done_until(at_s + HORIZON_S) - left_alone.done_until(at_s)
    done = changed.done_until(at_s + HORIZON_S) - changed.done_until(at_s)
    after = _after(changed, at_s)
    if alone <= 0 or done <= 0 or len(after) < SETTLE_STEPS + 2:
        return None
    step_s = median(after[SETTLE_STEPS : SETTLE_STEPS + CHECK_STEPS])
    return math.log(done / alone), math.log(step_s / step_now_s(job.steps_s))


def _after(changed: SimulatedMesh, at_s: float) -> list[float]:
    """The steps in which the newcomer has its share."""
    since_s = min((when for when in changed.newcomers.values()), default=math.inf)
    return [
        step.step_s
        for ended_s, step in zip(changed.stepped_at, changed.steps, strict=True)
        if ended_s >= max(since_s, at_s)
    ]


def packed(examples: list[Example], most: int = 16) -> dict[str, npt.NDArray[Any]]:
    """Examples as arrays, with nodes padded to `most`; stages of padding are −9."""
    count = len(examples)
    first = examples[0].graphs
    nodes = np.zeros((count, most, first.nodes.shape[1]), dtype=np.float32)
    marks = np.zeros((count, most, first.marks.shape[2]), dtype=np.float32)
    stages = np.full((count, most), -9, dtype=np.int64)
    for place, example in enumerate(examples):
        size = len(example.graphs.nodes)
        nodes[place, :size] = example.graphs.nodes
        marks[place, :size] = example.graphs.marks[0]
        stages[place, :size] = example.graphs.stages
    return {
        "nodes": nodes,
        "marks": marks,
        "stages": stages,
        "job": np.stack([example.graphs.job[0] for example in examples]).astype(np.float32),
        "gain": np.array([example.gain for example in examples], dtype=np.float32),
        "step": np.array([example.step for example in examples], dtype=np.float32),
        "seed": np.array([example.seed for example in examples], dtype=np.int64),
    }
