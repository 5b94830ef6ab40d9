"""Standbys of a job's stages (DESIGN §5 rule 9): they work while no other replica of their stage lives."""

from __future__ import annotations

from collections.abc import Collection

from entities.orchestrator.job_state.context import JobContext
from entities.orchestrator.planning.scaling import standby_weights
from entities.orchestrator.step.step_owner import StepOwner


class Standbys:
    """Changes the route weights of stages whose standbys must work now, or may rest again."""

    def __init__(self, job: JobContext, step_owner: StepOwner) -> None:
        self._job = job
        self._step_owner = step_owner
        self._backups: frozenset[str] = frozenset()

    def revise(self, backups: Collection[str] | None = None) -> None:
        """Checks which members live, and issues new weights where standbys have to start or stop working.

        `backups`: from now on, those that work because others' shares are sent to them; None: as before.
        """
        if backups is not None:
            self._backups = frozenset(backups)
        graph = self._job.instances.deployed
        if graph is None or not self._step_owner.running:
            return
        living = {member.sid for members in self._step_owner.stages for member in members}
        weights_now = self._job.policies.weights()
        for stage, weights in standby_weights(graph, weights_now, living, self._backups).items():
            awake = [unit.sid for unit in graph.stage(stage) if unit.standby and weights[unit.sid]]
            reason = f"standbys of stage {stage} {'work' if awake else 'rest'}"
            self._job.policies.revise(reason, weights=(stage, weights))
            takers = [sid for sid in awake if sid in living]
            if takers:
                who = f"standby {', '.join(takers)} takes over"
                self._job.events.recovery(f"stage {stage}: {who}, no other replica lives")
