"""Limits and times that two sides of the mesh must agree on: one definition, which both import."""

SLOWEST_BYTES_PER_S = 4e6
"""A transfer may take its timeout plus its size at this rate before it counts as broken.

Instances apply it to a link, the orchestrator to the state of a stage that moves in pieces."""

ALIKE = 0.15
"""Service times within this share of the stage's median count as equal to it, so that noise does not matter.

Routers decide by it when a table changes, and senders when they choose the next hop."""

REPEAT_FIRST_S, REPEAT_MOST_S = 0.2, 2.0
"""Bounds of the pause before an unanswered command or notice is repeated, which doubles between them.

After a reconnect there is no pause."""

TICK_S = 0.1
"""Seconds between ticks of a step machine, in the orchestrator and in the simulation."""

LEAST_BYTES_PER_S = 64e3
"""Lower bound of that rate, whatever was measured."""

MOST_MS = 1e7
"""The longest credible time of one transfer or microbatch, almost three hours; a report above is ignored."""
