"""One module per section of `benchmarks.built_in_policies`.

A section is a module whose docstring's first line says what it measures, with `run(bench: Bench) -> None`.
It loads its data through `benchmarks.policy_data`, says its split with `bench.say`, and adds rows to the
table. It is imported only when it runs, so that what it needs besides numpy concerns nobody else.
"""

from __future__ import annotations

SECTIONS: dict[str, str] = {
    "congestion": "benchmarks.policy_sections.congestion",
    "faults": "benchmarks.policy_sections.faults",
    "health": "benchmarks.policy_sections.health",
    "topology": "benchmarks.policy_sections.topology",
    "splits": "benchmarks.policy_sections.splits",
    "outages": "benchmarks.policy_sections.outages",
    "checkpoint": "benchmarks.policy_sections.checkpoint",
    "mesh-routing": "benchmarks.policy_sections.mesh_routing",
}
"""Name → module, in the order in which they run."""
