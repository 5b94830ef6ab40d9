"""What modules say about a fault at hand is carried out, bounded and measured (ADR-0099)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.job_state.context import JobTimes, RecoveryTimes
from entities.orchestrator.recovery.fault_choices import FaultChoices, outcome_of
from schemas.base import Message
from schemas.fault import FaultReport, FaultVerdict
from schemas.fault_choices import (
    FaultAction,
    FaultChoice,
    FaultCosts,
    FaultOutcome,
    FaultQuestion,
    FaultRuling,
    Replace,
    Retry,
    Wait,
)
from schemas.step import Member, Phase
from tests.builders.graphs import graph, placement, unit
from tests.builders.jobs import job as job_record
from tests.builders.policies import fault_choice
from tests.job_context import job_context
from tests.patience import PATIENCE_S
from tests.waiting import eventually

UNITS = ("j-s0-r0", "j-s0-r1")
SICK = Member(sid="j-s0-r1", incarnation="i1")


class Job:
    """A job of one stage with two replicas, and a module that says `answer` about each fault."""

    def __init__(self, answer: FaultAction | None, *former: FaultChoice, **times: float) -> None:
        self.answer = answer
        self.asked: list[FaultQuestion] = []
        self.distrusted: dict[str, str] = {}
        self.told: list[FaultChoice] = []
        self.published: list[Message] = []
        self.given_up: list[str] = []
        self.lost = asyncio.Event()
        self.wishes: dict[str, Replace] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.back = True
        members = {sid: Member(sid=sid, incarnation="i1") for sid in UNITS}
        self.instances: Any = SimpleNamespace(
            members=members,
            gone=set(),
            units=tuple(map(unit, UNITS)),
            graph=graph(
                *map(unit, UNITS), placements=tuple(placement(sid, at) for at, sid in enumerate(UNITS))
            ),
            agent_of=lambda sid: "a-n",
            is_before_entry=lambda member: False,
        )
        self.instances.is_present = lambda member: (
            members.get(member.sid) == member and member not in self.instances.gone
        )
        record = job_record("j").model_copy(update={"fault_choices": former})
        context = job_context(
            record,
            instances=self.instances,
            events=SimpleNamespace(fault_choice=lambda choice, _: self.told.append(choice)),
            bus=SimpleNamespace(publish=self._publish),
            mesh=SimpleNamespace(open_nodes=list, open_places=frozenset, records={}),
            queue=SimpleNamespace(occupied=lambda job: {}),
            tasks=SimpleNamespace(spawn=lambda work: self.tasks.append(asyncio.create_task(work))),
            ask_modules=self._ask,
            times=JobTimes(recovery=RecoveryTimes(**times)),
        )
        self.restarts: list[str] = []
        loop = SimpleNamespace(
            machine=SimpleNamespace(phase=Phase.GATHERING),
            post=lambda event: self.restarts.append(event.reason),
        )
        self.owner: Any = SimpleNamespace(running=True, step=3, loop=loop)
        self.joining: Any = SimpleNamespace(coming=set(), replacement=self)
        self.choices = FaultChoices(context, self.owner, self.joining, self._lose)

    async def _ask(self, job: str, question_of: Any, distrusted: Any) -> FaultRuling | None:
        self.distrusted = dict(distrusted)
        if self.answer is None:
            return None
        self.asked.append(question := question_of())
        await asyncio.sleep(0)
        return FaultRuling(
            question=question.id, action=self.answer, by="m", reason="why", costs=question.costs, asked=1
        )

    async def _publish(self, row: Any, message: Message, **tokens: str) -> None:
        self.published.append(message)

    def _lose(self, member: Member, why: str, event_text: str) -> None:
        self.given_up.append(why)
        self.instances.gone.add(member)
        self.lost.set()

    def wish(self, sid: str, where: Replace) -> None:
        self.wishes[sid] = where

    async def until_back(self, sid: str, timeout_s: float) -> bool:
        return self.back

    async def weigh(
        self, kind: Any = "unreachable", verdict: Any = "structural", member: Member = SICK, **more: Any
    ) -> FaultVerdict:
        who = member.model_dump()
        report = FaultReport(reporter="r", job="j", kind=kind, evidence="e", **who)
        said = FaultVerdict(job="j", verdict=verdict, scope="instance", action="a", reason="r", **who, **more)
        return await self.choices.weigh(member, report, said)

    def newcomer(self) -> None:
        self.instances.members[SICK.sid] = Member(sid=SICK.sid, incarnation="i2")


async def test_nobody_answers_and_the_verdict_stands():
    job = Job(None)
    assert (await job.weigh()).verdict == "structural"
    assert (job.asked, job.told, job.tasks) == ([], [], [])


async def test_an_instance_that_goes_on_in_time_is_not_given_up():
    job = Job(Wait(for_s=PATIENCE_S))
    verdict = await job.weigh()
    assert (verdict.verdict, job.published) == ("transient", [verdict])
    again = await job.weigh()  # reported by another neighbour
    assert (again.verdict, len(job.asked)) == ("transient", 1)
    job.choices.committed(2)
    assert job.told[-1].outcome is FaultOutcome.OPEN, "that step was decided before the fault"
    job.choices.committed(3)
    await asyncio.wait_for(job.tasks[0], PATIENCE_S)
    [done] = [choice for choice in job.told if choice.outcome is not FaultOutcome.OPEN]
    assert (done.lost, done.way, done.by, job.given_up) == (False, "wait", "m", [])
    assert done.took_s is not None
    assert done.took_s == done.back_s


async def test_neighbours_that_report_a_fault_at_once_make_one_question():
    job = Job(Wait(for_s=PATIENCE_S))
    verdicts = await asyncio.gather(job.weigh(), job.weigh(), job.weigh())
    assert [each.verdict for each in verdicts] == ["transient"] * 3
    assert (len(job.asked), len(job.told), len(job.tasks)) == (1, 1, 1)
    job.choices.committed(3)
    await asyncio.wait_for(job.tasks[0], PATIENCE_S)
    assert job.given_up == []


async def test_an_instance_that_does_not_is_given_up_at_the_limit():
    job = Job(Wait(for_s=1e6), loss_s=0.3)
    await job.weigh()
    await asyncio.wait_for(job.lost.wait(), PATIENCE_S)
    assert "wait of m: 0.3 s in vain" in job.given_up[0]
    assert len(job.restarts) == 1, "whoever did not reach it tries once more before"
    await job.choices.replacing(SICK, "r")
    assert len(job.asked) == 1, "nobody is asked twice"
    job.choices.committed(3)
    assert job.told[-1].outcome is FaultOutcome.OPEN, "its unit is not back"
    job.newcomer()
    job.choices.committed(4)
    assert (job.told[-1].outcome, job.told[-1].lost) == (FaultOutcome.NO_BETTER, True)


async def test_a_retry_ends_when_the_fault_is_reported_again():
    job = Job(Retry(), asked_again_s=0.0, loss_s=PATIENCE_S)
    await job.weigh()
    assert await eventually(lambda: job.restarts) == ["j-s0-r1 is asked once more, as m says"]
    await job.weigh()
    await asyncio.wait_for(job.lost.wait(), PATIENCE_S)
    assert "reported again" in job.given_up[0]


async def test_a_loss_long_after_its_instance_was_asked_about_is_asked_about():
    job = Job(Wait(for_s=PATIENCE_S), asked_again_s=0.0)
    await job.weigh()
    job.choices.committed(3)
    await asyncio.wait_for(job.tasks[0], PATIENCE_S)
    job.instances.gone.add(SICK)
    await job.choices.replacing(SICK, "gone")
    assert [each.lost for each in job.asked] == [False, True]


async def test_a_working_instance_is_given_up_only_where_another_one_works_and_seldom():
    job = Job(Replace(avoid=("a-n",)))
    assert (await job.weigh("slow", "transient")).verdict == "structural"
    assert job.wishes == {SICK.sid: Replace(avoid=("a-n",))}
    job.instances.gone.add(SICK)
    job.newcomer()
    job.choices.committed(3)
    assert job.told[-1].outcome is FaultOutcome.MEASURED
    again = await job.weigh("slow", "transient", member=job.instances.members[SICK.sid])
    assert again.verdict == "transient", "not twice within a minute"
    assert [each.may_replace for each in job.asked] == [True, False]
    alone = Job(Replace())
    alone.instances.gone.add(Member(sid="j-s0-r0", incarnation="i1"))
    assert (await alone.weigh("slow", "transient")).verdict == "transient"


async def test_the_replacement_of_one_that_has_ended_waits_for_its_slot():
    job = Job(Wait(for_s=5.0))
    assert (await job.weigh(ended=True)).verdict == "structural"
    assert job.asked == [], "an instance that has ended is not asked about twice"
    job.instances.gone.add(SICK)
    job.back = False
    await job.choices.replacing(SICK, "gone")
    assert (job.asked[0].lost, job.asked[0].usual, job.asked[0].replicas) == (True, "replace", 1)
    job.choices.recovered(SICK, 9.0)
    job.newcomer()
    job.choices.committed(3)
    assert job.told[-1].outcome is FaultOutcome.NO_BETTER
    job.asked.clear()
    await job.weigh()
    other = Member(sid="j-s0-r0", incarnation="i1")
    job.instances.gone.add(other)
    await job.choices.replacing(other, "gone")
    assert job.asked[-1].costs.replace_s is None, "a loss that was held says nothing of others"


async def test_three_waits_in_vain_and_the_module_is_not_believed():
    former = (fault_choice(outcome=FaultOutcome.NO_BETTER, question=f"q{one}") for one in range(3))
    job = Job(Wait(for_s=1.0), *former)
    await job.weigh()
    assert "no better" in job.distrusted["m"]


async def test_another_orchestrator_does_not_know_what_came_of_open_choices():
    job = Job(Retry(), fault_choice(), fault_choice(question="q2", way="replace", lost=True, took_s=2.0))
    await job.weigh()
    assert job.asked[0].costs == FaultCosts(replace_s=2.0)
    assert job.asked[0].most_wait_s == 2.0
    assert job.asked[0].past == 2


@pytest.mark.parametrize(
    ("choice", "outcome"),
    [
        (fault_choice(took_s=1.0), FaultOutcome.BETTER),
        (fault_choice(took_s=5.0), FaultOutcome.NO_BETTER),
        (fault_choice(took_s=1.0, lost=True), FaultOutcome.NO_BETTER),
        (fault_choice(took_s=1.0, costs=FaultCosts()), FaultOutcome.MEASURED),
        (fault_choice(took_s=1.0, way="replace"), FaultOutcome.MEASURED),
    ],
)
def test_the_outcome_is_by_the_forecast(choice: FaultChoice, outcome: FaultOutcome):
    assert outcome_of(choice) is outcome
