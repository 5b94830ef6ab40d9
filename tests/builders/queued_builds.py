"""Builds in the orchestrator's queue, as far as it looks at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from entities.orchestrator.data_builds.lane_holding import LaneHolding
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.builds import BuildRecord, BuildState
from schemas.usage import JobUsage


class BuildStandIn:
    """A build's run, as far as its lanes go."""

    def __init__(self, replicas: Any = 3, build: str = "b1a2b3", **queue: Any) -> None:
        spec = DataBuildSpec.model_validate(
            {"name": "corpus", "source": "x/*.txt", "replicas": replicas, "queue": queue}
        )
        self.record = BuildRecord(
            build=build,
            spec=spec,
            state=BuildState.QUEUED,
            user="rita",
            submitted_at=1.0,
            changed_at=1.0,
        )
        self.changes = 0
        self.queue_again: Callable[[], None] = lambda: None
        self.lanes = LaneHolding(self, self.changed)
        self.lanes.settle(9)

    def changed(self) -> None:
        self.changes += 1
        self.queue_again()

    def used(self, usage: JobUsage) -> None:
        self.record = self.record.model_copy(update={"usage": usage})

    def hold(self, why: str) -> None:
        self.record = self.record.model_copy(update={"held": why})

    def notify(self, text: str) -> None:
        raise AssertionError(text)

    def held(self) -> tuple[str, ...]:
        return self.lanes.active.slots if self.lanes.holds else ()
