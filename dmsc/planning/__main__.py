"""The planning process of a mesh: that of `entities.planner`, with the simulator as judge (ADR-0077)."""

from __future__ import annotations

from dmsc.planning.plan_judge import simulated_step_ms
from entities.planner.__main__ import main

if __name__ == "__main__":
    main(simulated_step_ms)
