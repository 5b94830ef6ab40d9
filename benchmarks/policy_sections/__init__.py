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
}
"""Name → module, in the order in which they run."""
