"""routing-bandit on our own mesh, simulated: time of a job with it beside expected completion alone.

Each scenario runs twice with the same draws, without and with the module. Nothing is trained beforehand.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from benchmarks.policy_sections.sheet import Bench
from dmsc.simulation.results.parallel import simulate
from dmsc.simulation.scenarios.scenario import Scenario
from policies.numerics.conservative_bandit import ConservativeBandit

SEEDS = 2
STEPS = 300
STAGE = {
    "forward_ms": {"mean_ms": 10, "distribution": "lognormal", "cv": 0.15},
    "backward_ms": {"mean_ms": 20, "distribution": "lognormal", "cv": 0.15},
    "output_bytes": 1.0e6,
    "parameter_bytes": 1.0e6,
}


def run(bench: Bench) -> None:
    everything: list[float] = []
    for name in ("equal", "unequal", "unequal, far", "one becomes slow", "a link becomes slow"):
        ratios = []
        for seed in range(bench.seed, bench.seed + SEEDS):
            alone, tried = (
                _seconds(_scenario(name, seed, policy), seed) for policy in ("none", "routing-bandit")
            )
            ratios.append(tried / alone)
        everything += ratios
        bench.at_most(
            f"time ÷ expected completion's, {name}",
            float(np.mean(ratios)),
            1.01,
            best=min(ratios),
            worst=max(ratios),
            note=f"{SEEDS} seeds, {STEPS} steps",
        )
    bench.at_most("the worst of all", max(everything), 1.01, note=f"{len(everything)} runs")
    bandit = ConservativeBandit(arms=4)
    bench.latency("inference", lambda: bandit.cost(bandit.choose(), 1.0))


def _scenario(name: str, seed: int, policy: str) -> Scenario:
    rng = random.Random(seed)
    speeds = [round(rng.uniform(0.3, 1.0), 2) if name.startswith("unequal") else 1.0 for _ in range(4)]
    far = name in ("unequal, far", "a link becomes slow")
    events: list[dict[str, object]] = []
    if name == "one becomes slow":
        events = [{"kind": "slow", "at_s": 15, "target": "job-s0-r0", "factor": 3, "for_s": 20}]
    if name == "a link becomes slow":
        events = [{"kind": "link", "at_s": 15, "between": ["a", "b"], "bandwidth_factor": 0.1, "for_s": 20}]
    clusters = [{"name": "a", "nodes": 2}, *([{"name": "b", "nodes": 2}] if far else [])]
    links = [{"between": ["a", "b"], "latency_ms": 10, "bandwidth_bytes_per_s": 1e8}] if far else []
    return Scenario.model_validate(
        {
            "name": "mesh",
            "clusters": clusters,
            "links": links,
            "events": events,
            "jobs": [
                {
                    "name": "job",
                    "steps": STEPS,
                    "microbatches": 24,
                    "stages": [{"replicas": 4, "speeds": speeds, **STAGE}, {"replicas": 3, **STAGE}],
                }
            ],
            "routing": {"policy": policy},
        }
    )


def _seconds(scenario: Scenario, seed: int) -> float:
    return simulate(scenario, seed, Path(), processes=1).jobs[0].seconds
