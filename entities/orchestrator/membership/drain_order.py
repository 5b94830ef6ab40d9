"""The order in which instances leave a node that is drained, one after the other.

Each leaves when a step is decided, so that nothing is computed twice. Some need training to rest for it: a
data instance, because the gateway dispatches to it from the decision on, and a stage's only instance, because
its state has to be written first. `membership_changes` carries the departures out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.recovery.replacement import Replacement
from schemas.step import Member
from schemas.task_graph import TaskUnit

Stages = Sequence[Collection[Member]]
"""Members with the state of the present version, by stage."""


class DrainOrder:
    """The instances that are to leave their node and have not left yet.

    `dropped` is called with the unit of one that was to leave, and does not.
    """

    def __init__(self, job: JobContext, replacement: Replacement, dropped: Callable[[str], None]) -> None:
        self._job = job
        self._replacement = replacement
        self._dropped = dropped
        self.requested: set[str] = set()
        """Units that have been told to leave, and have not left yet."""

    def waits(self, stages: Stages) -> bool:
        """Whether an instance is to leave that needs training to rest for it."""
        return any(self._needs_rest(sid, stages) for sid in self.requested)

    def ask(self, sid: str, stages: Stages, replaced: Collection[str]) -> str:
        """Has an instance leave when it can; returns what stands in the way, or ''.

        Args:
            sid: its unit.
            stages: the working members, by stage.
            replaced: units whose new incarnation is on its way.
        """
        why = self._obstacle(sid, stages, replaced)
        if not why:
            self.requested.add(sid)
        return why

    def next(self, stages: Stages, replaced: Collection[str], *, at_rest: bool) -> Member | None:
        """The instance that leaves now, or None. Obstacles are checked again: they may be new."""
        for sid in sorted(self.requested):
            if self._needs_rest(sid, stages) is not at_rest:
                continue
            self.requested.discard(sid)
            if not self._obstacle(sid, stages, replaced) and self._is_to_go(sid):
                return self._job.instances.members[sid]
            self.drop(sid)
        return None

    def drop(self, sid: str) -> None:
        """It stays after all: one that was to migrate is not asked for again."""
        self._replacement.stay(sid)
        self._dropped(sid)

    def _needs_rest(self, sid: str, stages: Stages) -> bool:
        unit = self._unit(sid)
        return unit is not None and (unit.is_data or len(stages[unit.stage]) <= 1)

    def _unit(self, sid: str) -> TaskUnit | None:
        """The unit; None if the job no longer has it."""
        return next((unit for unit in self._job.instances.units if unit.sid == sid), None)

    def _is_to_go(self, sid: str) -> bool:
        unit = self._unit(sid)
        return unit is not None and not self._replacement.may_stay(unit)

    def _obstacle(self, sid: str, stages: Stages, replaced: Collection[str]) -> str:
        if replaced:  # their places are not settled yet, so this instance might find none
            return f"{', '.join(sorted(replaced))} must be back first"
        member = self._job.instances.members.get(sid)
        if member is None or member in self._job.instances.lost:
            return "it is being replaced"
        unit = self._unit(sid)
        if unit is None:
            return "it is no longer wanted"
        if not unit.is_data:
            working = {member.sid for member in stages[unit.stage]}
            missing = sorted(
                other.sid for other in self._job.instances.graph.stage(unit.stage) if other.sid not in working
            )
            if missing:
                return f"{', '.join(missing)} must have joined first"
        return self._replacement.no_room([unit])
