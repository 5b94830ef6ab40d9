"""Limits and times that two sides of the mesh must agree on: one definition, which both import."""

SLOWEST_BYTES_PER_S = 4e6
"""A transfer may take its timeout plus its size at this rate before it counts as broken.

Instances apply it to a link, the orchestrator to the state of a stage that moves in pieces."""

LEAST_BYTES_PER_S = 64e3
"""Lower bound of that rate, whatever was measured."""

MOST_MS = 1e7
"""The longest credible time of one transfer or microbatch, almost three hours; a report above is ignored."""

SPEEDS_ALIKE = 1.25
"""Slots whose measured speeds differ by less than this factor count as equally fast: measurements of a second
are no finer."""

ALIKE = 0.15
"""Service times within this share of the stage's median count as equal to it, so that noise does not matter.

Routers decide by it when a table changes, and senders when they choose the next hop."""

REPEAT_FIRST_S, REPEAT_MOST_S = 0.2, 2.0
"""Bounds of the pause before an unanswered command or notice is repeated, which doubles between them.

After a reconnect there is no pause."""

TICK_S = 0.1
"""Seconds between ticks of a step machine, in the orchestrator and in the simulation."""

REMEMBERED_S = 60.0
"""How long a service keeps an answer for a repeated command; commands time out sooner (30 s by default)."""

CALLOUT_ANSWER_S = 1.0
"""How long a server waits for the authorizer; then it refuses the connection, and the client redials."""
CALLOUT_HELD_S = 0.7
"""How long the authorizer holds a question that it can't decide yet: less than `CALLOUT_ANSWER_S`."""
CALLOUT_UNANSWERED_S = 0.9
"""For a client, a refusal that takes this long comes from a server that waited for its authorizer in vain."""

MARKER_TTL_S = 60
"""How long the server keeps the marker of an expired key (`bus.messaging.stream_specs`: of a deleted one).
Watchers that were away for longer notice expiries by comparing (see `bus.messaging.key_value`), not by
markers."""
DELETION_TTL_S = 86_400
"""How long most buckets keep the marker of a deleted key (`bus.messaging.stream_specs.MARKERS_STAY`)."""
DUPLICATES_S = 120
"""Within this time, a stream stores a message id only once."""
LEAST_DUPLICATES_NS = 100_000_000
"""The shortest window that the server accepts, for streams that only record: their messages have no ids, and
an id that a sender invents is soon forgotten."""
INACTIVE_S = 60.0
"""The server removes a consumer whose reader has died after this time."""
LONGEST_PULL_NS = 30_000_000_000
"""How long a broker lets an asker's request for deliveries wait."""
LONGEST_TTL_S = 7 * 86_400
"""The longest lifetime of a value that a broker writes for an asker."""

CLOCK_SKEW_S = 60.0
"""How far the clocks of signer and checker of a credential may differ."""
HANDING_OVER_S = 60.0
"""How long an old root counts at least: by then a mesh's own processes have new credentials."""
