"""Small scenarios for the tests of the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dmsc.simulation.results.parallel import simulate
from dmsc.simulation.results.report import SimulationReport
from dmsc.simulation.scenarios.scenario import Scenario

NO_OVERHEADS = dict.fromkeys(
    ("hop_ms", "data_ms", "begin_ms", "prepare_ms", "decide_ms", "commit_ms", "control_ms", "form_ms"), 0.0
)


def body(**changes: Any) -> dict[str, Any]:
    """One job of two stages with two replicas each, without overheads and without latency."""
    stage = {"replicas": 2, "repeat": 2, "forward_ms": 10, "backward_ms": 20}
    job = {"name": "gpt", "steps": 6, "microbatches": 8, "stages": [stage]}
    return {
        "name": "test",
        "clusters": [{"name": "a"}],
        "links": [{"between": ["a", "a"], "latency_ms": 0}],
        "jobs": [job],
        "overheads": NO_OVERHEADS,
    } | changes


def job(**changes: Any) -> dict[str, Any]:
    return body()["jobs"][0] | changes


def stage(**changes: Any) -> dict[str, Any]:
    return body()["jobs"][0]["stages"][0] | {"repeat": 1} | changes


def run(
    scenario: dict[str, Any], seed: int = 0, folder: Path = Path(), processes: int = 1
) -> SimulationReport:
    return simulate(Scenario.model_validate(scenario), seed, folder, processes)
