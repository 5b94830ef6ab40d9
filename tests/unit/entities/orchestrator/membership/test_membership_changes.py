"""Orders to scale that follow each other sooner than steps do: the last one counts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.job_state.instances import MemberLost
from entities.orchestrator.membership.membership_changes import MembershipChanges
from schemas.errors import Conflict
from schemas.step import Member
from schemas.task_graph import TaskUnit
from tests.builders.graphs import graph, unit
from tests.job_context import job_context


def member(replica: int) -> Member:
    return Member(sid=f"j-s0-r{replica}", incarnation="i")


class Crew:
    """One stage, as far as changes look at it; who is ended waits in `ending`."""

    def __init__(self, replicas: int) -> None:
        self.graph = graph(*(unit(f"j-s0-r{number}") for number in range(replicas)))
        self.members = {one.sid: one for one in map(member, range(replicas))}
        self.lost: set[Member] = set()
        self.stages: tuple[tuple[Member, ...], ...] = (tuple(self.members.values()),)
        self.coming: tuple[str, ...] = ()
        self.homeless: set[str] = set()
        self.replacement = self
        self.brought: list[str] = []
        self.sent_away: set[str] = set()
        self.ending = asyncio.Event()
        self.tasks: list[asyncio.Task[Any]] = []

    def changes(self) -> MembershipChanges:
        one: Any = self
        telling: Any = SimpleNamespace(changed=lambda text: None, recovery=lambda text: None)
        standbys: Any = SimpleNamespace(revise=lambda: None)
        stage: Any = Stage(self)
        job = job_context(instances=one, events=telling, tasks=one)
        return MembershipChanges(job, stage, one, standbys, one)

    def forgo(self, sid: str) -> bool:
        return sid in self.homeless

    def no_room(self, units: list[TaskUnit]) -> str:
        return ""

    def bring(self, sid: str, lost: Member | None = None) -> None:
        self.brought.append(sid)

    @property
    def units(self) -> tuple[TaskUnit, ...]:
        return self.graph.units

    def may_stay(self, one: TaskUnit) -> bool:
        return one.sid not in self.sent_away

    def send_away(self, sid: str, agent: str | None) -> None:
        self.sent_away.add(sid)

    def stay(self, sid: str) -> None:
        self.sent_away.discard(sid)

    async def unless_failed(self, work: Any) -> Any:
        return await work

    async def of_this_step(self, step: int, stages: object, reason: str) -> bool:
        raise MemberLost([member(0)], "no answer to the order of a checkpoint")

    def mark_lost(self, gone: Member) -> None:
        self.lost.add(gone)

    def spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def end(self, gone: Member) -> None:
        await self.ending.wait()

    async def ended(self) -> None:
        self.ending.set()
        await asyncio.gather(*self.tasks)


class Stage:
    """The training's progress."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.running, self.at_end, self.step = True, True, 4

    @property
    def stages(self) -> tuple[tuple[Member, ...], ...]:
        return self._crew.stages

    def lost(self, gone: Member) -> None:
        self._crew.stages = (tuple(one for one in self._crew.stages[0] if one != gone),)


async def test_one_that_was_to_leave_stays_if_it_is_wanted_again() -> None:
    crew = Crew(2)
    changes = crew.changes()
    assert changes.scale([0], 1) == "j-s0-r1 will leave"
    assert changes.departing == "j-s0-r1 is about to leave", "a re-cut does not begin now"
    assert changes.scale([0], 2) == "j-s0-r1 will stay"
    assert changes.departing == ""
    assert changes.scale([0], 2) == "nothing to do"
    changes.decided()
    assert crew.lost == set()
    assert len(crew.graph.units) == 2


async def test_one_that_is_on_its_way_in_leaves_once_it_is_there() -> None:
    crew = Crew(1)
    changes = crew.changes()
    assert changes.scale([0], 2) == "j-s0-r1 will join"
    assert crew.brought == ["j-s0-r1"]
    assert changes.scale([0], 1) == "j-s0-r1 will leave"
    changes.decided()
    assert crew.lost == set()
    crew.members["j-s0-r1"] = member(1)
    crew.stages = ((member(0), member(1)),)
    changes.decided()
    assert crew.lost == {member(1)}
    await crew.ended()
    assert [one.sid for one in crew.graph.units] == ["j-s0-r0"]


async def test_while_one_is_leaving_another_order_is_asked_for_later() -> None:
    crew = Crew(2)
    changes = crew.changes()
    changes.scale([0], 1)
    changes.decided()
    with pytest.raises(Conflict, match=r"j-s0-r1 of stage 0 is just leaving: ask again in a moment"):
        changes.scale([0], 2)
    await crew.ended()
    assert changes.scale([0], 2) == "j-s0-r1 will join"


async def test_a_replica_that_finds_no_room_leaves_first_and_at_once() -> None:
    crew = Crew(3)
    changes = crew.changes()
    crew.lost = {member(1)}
    crew.stages = ((member(0), member(2)),)
    crew.coming, crew.homeless = ("j-s0-r1",), {"j-s0-r1"}
    assert changes.scale([0], 2) == "j-s0-r1 will leave"
    changes.decided()
    assert [unit.sid for unit in crew.graph.units] == ["j-s0-r0", "j-s0-r2"]
    assert "j-s0-r1" not in crew.members
    assert changes.leaving == frozenset()


async def test_one_that_dies_before_its_checkpoint_is_to_leave_its_slot_no_more() -> None:
    crew, stay = Crew(1), list[str]()
    changes = crew.changes()
    changes.on_stay = stay.append
    assert changes.migrate("j-s0-r0", None) == ""
    with pytest.raises(MemberLost):
        await changes.at_rest()
    assert stay == ["j-s0-r0"]
    assert (crew.sent_away, changes.departing) == (set(), "")
