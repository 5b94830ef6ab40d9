"""The planner beside solvers, oracles and experts: a file for each part that is measured."""

SECTIONS = {
    "cuts": "benchmarks.planner_sections.cuts",
    "size": "benchmarks.planner_sections.size",
    "loop": "benchmarks.planner_sections.leader_loop",
    "instances": "benchmarks.planner_sections.unequal_instances",
    "placement": "benchmarks.planner_sections.link_loads",
    "memory": "benchmarks.planner_sections.memory",
}
"""Name → module with a function `run(bench)`."""
