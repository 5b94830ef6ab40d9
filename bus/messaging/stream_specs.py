"""The streams with their subjects and bounds, and the buckets, derived from the table of subjects."""

from __future__ import annotations

from dataclasses import dataclass

from bus.nats.jetstream import DELETION
from bus.subject_row import Delivery
from bus.subjects import SUBJECTS
from schemas.limits import DELETION_TTL_S, MARKER_TTL_S


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream's subjects and bounds.

    `acknowledged` is off for streams that merely record core traffic: JetStream would otherwise answer into
    the reply inbox of the publisher.
    """

    name: str
    subjects: tuple[str, ...]
    max_bytes: int
    max_age_s: float = 0.0
    acknowledged: bool = False
    final: bool = False  # nobody may delete or purge; messages leave by the bounds only
    in_memory: bool = False  # may be gone with its server: what it holds can be made again


def _streams() -> tuple[StreamSpec, ...]:
    bounds = {  # bytes and seconds; a day of a busy mesh of tens of instances
        "JOBS": (256 << 20, 0.0),
        "SIGNALS": (64 << 20, 86_400.0),
        "STEPS": (128 << 20, 86_400.0),
        "TELEMETRY": (128 << 20, 86_400.0),
        "POLICIES": (64 << 20, 0.0),
        "LEARNT": (64 << 20, 7 * 86_400.0),
        "ACCOUNTS": (128 << 20, 7 * 86_400.0),
        "FAULTS": (64 << 20, 0.0),
        "FAULT_QUEUE": (32 << 20, 30 * 86_400.0),
        "LOGS": (64 << 20, 86_400.0),
        "DEAD_LETTERS": (16 << 20, 86_400.0),
        "UNREADABLE": (64 << 20, 90 * 86_400.0),
        "GENERATIONS": (8 << 20, 3_600.0),
        "AUDIT": (
            256 << 20,
            0.0,
        ),  # refusals are folded (entities/authorizer/audit/rate_limited_records.py): weeks of an attack
    }
    specs = []
    for name, (size, age) in bounds.items():
        rows = [row for row in SUBJECTS if row.stream == name]
        specs.append(
            StreamSpec(
                name,
                tuple(row.wildcard() for row in rows),
                size,
                age,
                acknowledged=any(row.delivery is Delivery.STREAM for row in rows),
                final=name == "AUDIT",
                in_memory=name == "GENERATIONS",
            )
        )
    return tuple(specs)


STREAMS = _streams()
IN_MEMORY = frozenset({"generations"})
"""Buckets that are never on a disk: prompts of users, which their gateway writes again."""
KEEPS_PREVIOUS = frozenset(
    {
        *("jobs", "users", "revocations", "cordons", "modules", "standings", "link_secrets", "secrets"),
        *("datasets", "builds", "data_sets", "reservations", "automation", "learnt", "services", "batches"),
        *("accounts", "service_salt"),
        *("models", "model_versions", "alias_moves"),
        "consents",
        "machine_pools",
    }
)
"""Buckets whose values exist nowhere else. Their streams keep earlier values, in case the newest can't be
read. Buckets that change often, or whose values others can publish again (registry, routes, leadership,
answers, uploads), keep only the newest. So do `steps`, because a decision that is not the last is worse
than none, and `feeds`, whose rows are written once, and `kept`, whose rows must be gone once they are
deleted."""
MARKERS_STAY = frozenset(
    {
        *("users", "revocations", "secrets", "cordons", "modules", "standings", "datasets", "data_sets"),
        *("reservations", "models", "model_versions", "alias_moves"),
    }
)
"""Buckets in which a deleted key must never be there again, and in which few keys are deleted (ADR-0067).

The server removes a value that a newer one displaces without a note of that. After a kill of its process it
reads its files anew. A displaced value is gone again, because the newer one displaces it anew; but if that
was a marker, and has expired since, the displaced value is back (nats-server 2.15.1, its issue 8505). After
a day the files of a bucket that changes often hold no trace of the value any more. In others it stays for
ever, and so do their markers."""
PREVIOUS_VALUES = 8
"""How many values per key such a bucket keeps."""
BUCKETS = tuple(sorted({row.bucket for row in SUBJECTS if row.bucket}))


def deletion_headers(bucket: str) -> dict[str, str]:
    """Headers of the marker of a deleted key in this bucket (see `MARKERS_STAY`)."""
    if bucket in MARKERS_STAY:
        return DELETION
    # Pieces lie under a number of their feed that is given once: nobody looks for those of a deleted feed.
    return DELETION | {"Nats-TTL": str(MARKER_TTL_S if bucket == "feed_records" else DELETION_TTL_S)}
