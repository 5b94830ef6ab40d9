"""A `JobContext` for tests of one part of the orchestrator: only what that part looks at."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from entities.orchestrator.job_state.context import JobContext, JobTimes
from schemas.job import JobRecord
from tests.builders.jobs import job


def job_context(record: JobRecord | None = None, **parts: Any) -> Any:
    """The context of job `j`, or of the job that `record` names, with these parts and no others."""
    record = record or job("j")
    given: dict[str, Any] = {"name": record.job, "spec": record.spec, "epoch": record.epoch}
    given |= {"store": SimpleNamespace(record=record), "times": JobTimes()}
    context: Any = SimpleNamespace(**given | parts)
    context.eligible_nodes = partial(JobContext.eligible_nodes, context)
    return context
