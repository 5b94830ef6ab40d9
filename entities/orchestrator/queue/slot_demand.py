"""Which jobs hold which slots, and which jobs wait for some."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.queue.job_queue import Waiting
from schemas.task_graph import Placement


class RunningJob(Protocol):
    """What one job's run has to show to the others."""

    @property
    def name(self) -> str:
        """Its id."""

    @property
    def placements(self) -> Sequence[Placement]:
        """Where its units run, or are to run."""

    @property
    def waiting(self) -> Waiting | None:
        """Its place in the queue; None if it does not wait for room."""

    @property
    def finds_room(self) -> bool:
        """Whether it is about to place an instance that it lost."""


class SlotDemand:
    """The demand for slots during one term. `runs`: the jobs that have not ended, by id."""

    def __init__(self, mesh: MeshView, runs: Mapping[str, RunningJob]) -> None:
        self._mesh = mesh
        self._runs = runs

    def occupied(self, job: str) -> dict[str, list[Placement]]:
        """Slots promised to all jobs but this one, by node agent."""
        taken: dict[str, list[Placement]] = defaultdict(list)
        for run in self._runs.values():
            if run.name == job:
                continue
            for place in run.placements:
                agent = self._mesh.agent_of(place.cluster, place.node)
                if agent is not None and place.slot >= 0:
                    taken[agent].append(place)
        return taken

    def line(self) -> Iterator[Waiting]:
        """The jobs that wait for room."""
        for run in self._runs.values():
            if (waiting := run.waiting) is not None:
                yield waiting

    def urgent(self) -> bool:
        """Whether a running job is about to place an instance that it lost: it comes before the queue."""
        return any(run.finds_room for run in self._runs.values())
