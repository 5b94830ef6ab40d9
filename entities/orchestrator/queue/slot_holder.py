"""What the queue sees of jobs' runs and of builds: who waits, and who holds which slots or lanes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from entities.orchestrator.queue.mesh_slots import slot_name
from entities.queue.queued_job import ActiveJob, QueuedJob
from schemas.data_set.builds import BuildRecord
from schemas.job import JobRecord
from schemas.task_graph import Placement


class QueueMember(Protocol):
    """Whatever waits in the queue, and then holds something."""

    @property
    def name(self) -> str:
        """Its id."""

    @property
    def held(self) -> str:
        """Why it waits for a person; empty: it does not."""

    @property
    def holds(self) -> bool:
        """Whether it has slots or lanes, or is to leave some."""

    @property
    def waiting(self) -> QueuedJob | None:
        """What it asks for; None if it does not wait for room."""

    @property
    def active(self) -> ActiveJob:
        """What it holds; of a job without the slots, which follow from its placements."""

    def give_way(self, why: str, *, held: bool) -> bool:
        """Has it park for another one, or until a person resumes it (`held`); False: not now."""

    def notify(self, text: str) -> None:
        """Tells it what will become of what it holds."""


class SlotHolder(QueueMember, Protocol):
    """What one job's run has to show to the queue, and takes from it."""

    @property
    def record(self) -> JobRecord:
        """Its record."""

    @property
    def placements(self) -> Sequence[Placement]:
        """Where its units run, or are to run; those last that leave first when it shrinks."""

    @property
    def leaving(self) -> Collection[str]:
        """The units among them that were told to leave."""

    @property
    def finds_room(self) -> bool:
        """Whether it is about to place an instance that it lost."""

    def resize(self, replicas: int, why: str) -> bool:
        """Has it take or leave slots, to so many replicas; False: not now."""


class LaneHolder(QueueMember, Protocol):
    """What one build has to show to the queue, and takes from it: lanes, for a unit each."""

    @property
    def record(self) -> BuildRecord:
        """Its record."""

    def take(self, lanes: Sequence[str]) -> None:
        """It may do units in these lanes."""

    def leave(self, lanes: Collection[str]) -> None:
        """It gives these lanes up, each once its unit has ended."""

    def keep_to(self, lanes: Collection[str]) -> None:
        """Only these are open: it begins no unit in others."""

    def wait(self, why: str, *, never: bool) -> None:
        """Tells it why it waits, or that it waits in vain (`never`)."""


class SeenHolders:
    """What the runs that were looked at ask for, or hold. `agents`: SIDs, by cluster and node."""

    def __init__(self, agents: Mapping[tuple[str, str], str]) -> None:
        self._agents = agents
        self.waiting: list[QueuedJob] = []
        self.holding: dict[str, ActiveJob] = {}

    def add(self, run: SlotHolder) -> None:
        """Looks at one more run."""
        if (job := run.waiting) is not None:
            self.waiting.append(job)
        else:
            self.holding[run.name] = self._held(run)

    def _held(self, run: SlotHolder) -> ActiveJob:
        """A job with its slots; those of nodes that are away are not counted."""
        leaving, slots, gone = run.leaving, [], []
        for place in run.placements:
            agent = self._agents.get((place.cluster, place.node))
            if agent is None or place.slot < 0:
                continue
            name = slot_name(agent, place.slot)
            slots.append(name)
            if place.sid in leaving:
                gone.append(name)
        return replace(run.active, slots=tuple(slots), leaving=frozenset(gone))
