"""The lanes of one build: what the queue sees of it, and gives to it or takes (ADR-0088).

A lane is a place for one unit at a time, at a node. A build keeps its lanes from unit to unit. It gives one
up when its unit has ended: the queue wants it, its slot computes, or the phase has fewer units left.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from entities.orchestrator.data_builds.phases import phases_of
from entities.orchestrator.data_builds.unit_ledger import AgentLoad
from entities.orchestrator.queue.lanes import agent_of
from entities.orchestrator.queue.mesh_slots import ran_s
from entities.queue.queued_job import ActiveJob, JobRequest, QueuedJob, Replicas, WorkKind
from entities.queue.slot_pools import SlotNeeds
from schemas.data_set.builds import BuildRecord, BuildState
from schemas.usage import JobUsage


class ParksBuild(Protocol):
    """The build's run, as far as it parks and is told something."""

    @property
    def record(self) -> BuildRecord:
        """The build's record."""

    def used(self, usage: JobUsage) -> None:
        """Takes what it has used into the record."""

    def hold(self, why: str) -> None:
        """It waits for a person from now on."""

    def notify(self, text: str) -> None:
        """Tells its followers."""


class LaneHolding:
    """One build's place in the queue, or its lanes.

    Args:
        run: the build's run.
        changed: called whenever the queue has to look again.
    """

    def __init__(self, run: ParksBuild, changed: Callable[[], None]) -> None:
        self._run = run
        self._changed = changed
        self._units: dict[str, str] = {}  # lane → key of its unit; empty: it is idle
        self._leaving: set[str] = set()
        self._shut: set[str] = set()
        self._granted_at = time.time()
        self._parks = ""
        self._useful = 1  # lanes for which the present phase has units
        self.parked = False
        """Whether it has given up its last lanes because it was to park."""
        self.reason = ""
        """Why it waits, as the queue said last."""
        self.in_vain = False
        """Whether what it was to start after has failed."""
        self.wake: Callable[[], None] = lambda: None
        """Called whenever the build may have something to do."""

    # --- what the queue sees --------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return self._run.record.build

    @property
    def record(self) -> BuildRecord:
        return self._run.record

    @property
    def held(self) -> str:
        return self._run.record.held

    @property
    def holds(self) -> bool:
        return bool(self._units)

    @property
    def _ends(self) -> bool:
        return self._run.record.ends_as is not None

    @property
    def waiting(self) -> QueuedJob | None:
        if self._units or self._ends:
            return None
        record = self._run.record
        return QueuedJob(
            request=self._request(record.held),
            since=record.submitted_at,
            attained_slot_s=record.usage.slot_s,
            ran_s=ran_s(record, time.time()),
            parked=bool(record.phases),
        )

    @property
    def active(self) -> ActiveJob:
        record, now = self._run.record, time.time()
        usage = record.usage.held(len(self._units), now)
        leaving = frozenset(self._units if self._parks or self._ends else self._leaving)
        request, staying = self._request(), max(1, len(self._units) - len(leaving))
        working = sorted(self._units, key=lambda lane: not self._units[lane])  # idle ones leave first: last
        return ActiveJob(
            request=request,
            replicas=staying,
            slots=tuple(lane for lane in working if lane not in leaving) + tuple(sorted(leaving)),
            started_at=self._granted_at,
            work_s=self._work_s(request, staying),
            attained_slot_s=usage.slot_s,
            ran_s=ran_s(record, now),
            leaving=leaving,
            leaves_at=now,
            fixed=bool(self._parks) or self._ends,
        )

    def _request(self, held: str = "") -> JobRequest:
        record = self._run.record
        spec, asked = record.spec, record.spec.queue
        least, want, most = spec.units_at_a_time
        useful = max(least, self._useful)
        return JobRequest(
            job=record.build,
            work=WorkKind.PREPARATION,
            submitted_at=record.submitted_at,
            tenant=record.user,
            priority=asked.priority,
            replicas=Replicas(least=least, want=min(want, useful), most=min(most, useful)),
            needs=SlotNeeds(clusters=tuple(sorted(spec.clusters)), lane=True),
            deadline=None if asked.deadline_s is None else record.submitted_at + asked.deadline_s,
            after=asked.after,
            wall_time_s=asked.wall_time_s,
            held=held,
        )

    def _work_s(self, request: JobRequest, lanes: int) -> float | None:
        """Predicted seconds that are left with the lanes that it wants; None before its last phase."""
        record = self._run.record
        last = record.phases[-1].phase if record.phases else ""
        if record.left_s is None or last != phases_of(record.spec)[-1]:
            return None
        return record.left_s * request.speed(lanes)

    # --- what the queue has it do ---------------------------------------------------------------------------
    def take(self, lanes: Sequence[str]) -> None:
        """It may do units in these lanes."""
        if self._ends or not lanes:
            return
        if not self._units:
            self._granted_at, self._parks, self.reason, self.parked = time.time(), "", "", False
        self._units.update((lane, "") for lane in lanes if lane not in self._units)
        self._leaving.difference_update(lanes)
        self._counted()
        self.wake()

    def leave(self, lanes: Collection[str]) -> None:
        """It gives these lanes up, each once its unit has ended."""
        self._leaving.update(lane for lane in lanes if lane in self._units)
        self._drop_idle()

    def keep_to(self, lanes: Collection[str]) -> None:
        """Only these are open: it begins no unit in others."""
        self._shut = {lane for lane in self._units if lane not in lanes}
        self._drop_idle()

    def wait(self, why: str, *, never: bool) -> None:
        """Tells it why it waits, or that it waits in vain (`never`)."""
        if self._units or (self.reason, self.in_vain) == (why, never):
            return
        self.reason, self.in_vain = why, never
        self.wake()

    def give_way(self, why: str, *, held: bool) -> bool:
        """Has it begin no more units, until the queue gives it lanes, or a person (`held`)."""
        if self._ends or self._parks or not self._units:
            return False
        if held:
            self._run.hold(why)
        self.park(why)
        return True

    def notify(self, text: str) -> None:
        """Tells its followers what becomes of its lanes."""
        self._run.notify(text)

    # --- what its run does ----------------------------------------------------------------------------------
    @property
    def parks(self) -> str:
        """Why it begins no more units; empty: it does, or has no lanes any more."""
        return self._parks if self._units else ""

    def park(self, why: str) -> None:
        """It gives up all its lanes, each once its unit has ended."""
        if self._units:
            self._parks = why
            self._drop_idle()

    def go_on(self) -> None:
        """A park that has not come about is taken back."""
        self._parks = ""
        self._changed()

    def settle(self, units_left: int) -> None:
        """So many units of the phase are left: lanes beyond them are others', but for the minimum."""
        least, _, most = self._run.record.spec.units_at_a_time
        useful = max(least, min(most, units_left))
        if useful == self._useful:
            return
        self._useful = useful
        surplus = len(self._units) - useful
        idle = [lane for lane, unit in self._units.items() if not unit]
        self._drop(idle[len(idle) - min(len(idle), surplus) :] if surplus > 0 else ())
        self._changed()

    @property
    def idle(self) -> int:
        """How many units may begin now."""
        return 0 if self._parks else len(self._idle())

    def loads(self, everywhere: Iterable[AgentLoad]) -> list[AgentLoad]:
        """The agents of its lanes, with the units that it may have there and has.

        Args:
            everywhere: all agents that take units now, with what is known of them.
        """
        closing = self._leaving | self._shut
        room = Counter(agent_of(lane) for lane in self._units if lane not in closing)
        working = Counter(
            agent_of(lane) for lane, unit in self._units.items() if unit and lane not in closing
        )
        return [
            AgentLoad(load.agent, room[load.agent], working[load.agent], load.unit_s)
            for load in everywhere
            if room[load.agent]
        ]

    def begin(self, agent: str, unit: str) -> str:
        """A unit begins, best in a lane of this agent; returns the lane that is its now."""
        idle = self._idle()
        lane = next((lane for lane in idle if agent_of(lane) == agent), idle[0])
        self._units[lane] = unit
        return lane

    def end(self, lane: str) -> None:
        """The unit in this lane has ended."""
        if lane in self._units:
            self._units[lane] = ""
            self._drop_idle()

    def clear(self) -> None:
        """The build has ended, and with it all its units."""
        self._drop(tuple(self._units))

    def _idle(self) -> list[str]:
        closing = self._leaving | self._shut
        return [lane for lane, unit in self._units.items() if not unit and lane not in closing]

    def _drop_idle(self) -> None:
        closing = self._units.keys() if self._parks else self._leaving | self._shut
        self._drop([lane for lane in closing if not self._units.get(lane, "")])

    def _drop(self, lanes: Iterable[str]) -> None:
        gone = [lane for lane in lanes if self._units.pop(lane, None) is not None]
        if not gone:
            return
        self.parked |= bool(self._parks) and not self._units
        self._leaving.difference_update(gone)
        self._shut.difference_update(gone)
        self._counted()
        self._changed()
        self.wake()

    def _counted(self) -> None:
        self._run.used(self._run.record.usage.held(len(self._units), time.time()))


def may_resume(record: BuildRecord, parks: str) -> bool:
    """Whether a person can have it go on: it is parked or held, or about to be."""
    return bool(record.held or parks) or record.state is BuildState.PARKED
