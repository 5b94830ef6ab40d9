"""The real simulator as judge of plans: some steps of a plan in virtual time (ADR-0077).

The instances are simulated by the mesh's own machines, routers and senders, so what routing by load makes of
unequal instances is in the step.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from dmsc.simulation.scenarios.scenario import Overheads, Scenario
from dmsc.simulation.world import World
from entities.planner.search.plan_trial import PlanTrial

WARMUP = 1


def simulated_step_ms(trial: PlanTrial) -> float:
    """The median of the trial's steps after the first, milliseconds."""
    world = World(scenario_of(trial), 0, Path())
    world.run()
    steps = world.jobs["plan"].progress.steps[WARMUP:]
    return 1e3 * statistics.median(step.ended_s - step.began_s for step in steps)


def scenario_of(trial: PlanTrial) -> Scenario:
    """The plan as a scenario. A third of a stage's work is forward, as of most layers."""
    overheads = Overheads(hop_ms=trial.hop_ms)
    # making the first microbatch and its first hop are part of the constant, too
    around_ms = max(0.0, trial.constant_ms - overheads.hop_ms - overheads.data_ms)
    stages = [
        {
            "replicas": len(stage.speeds),
            "speeds": stage.speeds,
            "forward_ms": {"mean_ms": max(1e-6, stage.work_ms / 3)},
            "backward_ms": {"mean_ms": max(1e-6, 2 * stage.work_ms / 3)},
            "output_bytes": stage.output_bytes,
            "parameter_bytes": stage.sums_bytes,
        }
        for stage in trial.stages
    ]
    return Scenario.model_validate(
        {
            "name": "plan",
            "clusters": [{"name": "a"}],
            "links": [
                {
                    "between": ["a", "a"],
                    "latency_ms": 0,
                    "bandwidth_bytes_per_s": trial.link_bytes_per_s,
                }
            ],
            "jobs": [
                {
                    "name": "plan",
                    "steps": trial.steps,
                    "warmup_steps": WARMUP,
                    "microbatches": trial.microbatches,
                    "stages": stages,
                    "data_instances": trial.data_instances,
                }
            ],
            "overheads": overheads.model_copy(
                update={"begin_ms": around_ms / 2, "prepare_ms": around_ms / 2, "decide_ms": 0.0}
            ),
        }
    )
