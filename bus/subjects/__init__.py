"""The table of subjects: each row binds a subject to its schema, its direction, and its delivery.

No other package contains a literal subject. The tap's decoding, the documentation
(`docs/protocol.md`), the permissions of each identity (`bus.guard.permissions`) and the types of requests and
answers are derived from this table. Everything that sends or receives imports it. It opens no connection and
decides nothing. Each file holds the rows of one domain; `table` has the names of the parties.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from bus.subject_row import Subject
from bus.subjects import (
    accounts,
    data_sets,
    faults,
    jobs,
    mesh,
    models,
    node_agents,
    policies,
    registry,
    services,
    signals,
    stage_state,
    step,
)

# Each module's `__all__` says what a star brings, and stands in ours below.
from bus.subjects.accounts import *  # noqa: F403
from bus.subjects.data_sets import *  # noqa: F403
from bus.subjects.faults import *  # noqa: F403
from bus.subjects.jobs import *  # noqa: F403
from bus.subjects.mesh import *  # noqa: F403
from bus.subjects.models import *  # noqa: F403
from bus.subjects.node_agents import *  # noqa: F403
from bus.subjects.policies import *  # noqa: F403
from bus.subjects.registry import *  # noqa: F403
from bus.subjects.services import *  # noqa: F403
from bus.subjects.signals import *  # noqa: F403
from bus.subjects.stage_state import *  # noqa: F403
from bus.subjects.step import *  # noqa: F403

__all__ = ["DISCONNECTED", "SUBJECTS", "lookup"]
__all__ += accounts.__all__
__all__ += data_sets.__all__
__all__ += faults.__all__
__all__ += jobs.__all__
__all__ += mesh.__all__
__all__ += models.__all__
__all__ += node_agents.__all__
__all__ += policies.__all__
__all__ += registry.__all__
__all__ += services.__all__
__all__ += signals.__all__
__all__ += stage_state.__all__
__all__ += step.__all__

DISCONNECTED = "dmsc.server.disconnect"
"""The subject on which the server itself reports closed connections, in its own JSON; see
`bus.messaging.disconnects`."""


def _rows(domain: ModuleType) -> list[Subject]:
    return [value for value in vars(domain).values() if isinstance(value, Subject)]


SUBJECTS: list[Subject] = [
    row
    for domain in (
        *(signals, registry, mesh, node_agents, step, stage_state, policies, faults, jobs, data_sets),
        services,
        accounts,
        models,
    )
    for row in _rows(domain)
]
"""All rows, in the order of the draft's flow."""

_EARLIER = tuple(
    (replace(row, pattern=pattern), row)
    for row, pattern in (
        (node_agents.TOPOLOGY, "topology.model.{job}"),
        (node_agents.ANALYSIS_FAILED, "topology.failed.{job}"),
        (node_agents.SAMPLE_WRITTEN, "topology.sample.{job}"),
        (policies.SUGGESTION, "policy.suggestion.{module}"),
        (policies.POLICY_SCORE, "policy.score.{module}"),
        (policies.MODULE_LIFECYCLE, "policy.lifecycle.{module}"),
        (faults.LINK_FAULT, "fault.link.{cluster}"),
    )
)
"""Patterns of rows from before subjects named the sender, as in runs that were recorded then."""


def lookup(subject: str) -> tuple[Subject, dict[str, str]] | None:
    """The row of a concrete subject and its tokens; None for subjects that are not ours."""
    for row in _candidates(subject):
        tokens = row.matches(subject)
        if tokens is not None:
            return row, tokens
    for earlier, row in _EARLIER:
        tokens = earlier.matches(subject)
        if tokens is not None:
            return row, tokens
    return None


def _candidates(subject: str) -> list[Subject]:
    if subject.startswith("$KV."):
        bucket = subject.split(".", 2)[1]
        return [row for row in SUBJECTS if row.bucket == bucket]
    return [row for row in SUBJECTS if row.bucket is None]
