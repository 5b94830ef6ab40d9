"""While a cut of one job is looked for and judged the loop goes on, and does nothing else of that job."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entities.orchestrator.automation import loop_service
from entities.orchestrator.automation.loop_memory import LoopMemory
from entities.orchestrator.automation.loop_service import LoopTimes, OwnLoop
from entities.orchestrator.automation.remedies import RECUT, Remedy
from entities.orchestrator.automation.situation import JobSituation
from entities.orchestrator.policy.arbitration import Outcome
from schemas.actions import Recut
from schemas.automation import Automation
from schemas.job import JobState
from schemas.policy import PolicySuggestion
from tests.builders.jobs import job as job_record
from tests.builders.policies import forecast
from tests.job_context import job_context
from tests.patience import PATIENCE_S

REMEDY = Remedy(key=RECUT, action=Recut(forecast=forecast()), reason="r", saving=0.5, dwell_s=0.0, net_s=9.0)


class Deposed(Exception):
    """The term is over."""


class Term:
    """Lasts until the job's suggestion was judged; the job ends while it is."""

    def __init__(self, runs: dict[str, Any]) -> None:
        self.runs = runs
        self.looks = 0
        self.suggested: list[PolicySuggestion] = []
        self.judging, self.may_end, self.judged = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def confirmed(self) -> None:
        self.looks += 1
        if self.looks == 2:
            await self.judging.wait()
        if self.looks == 5:
            self.runs.clear()
        if self.looks == 6:
            self.may_end.set()
            await self.judged.wait()
            raise Deposed

    async def consider(self, message: PolicySuggestion) -> Outcome:
        self.suggested.append(message)
        self.judging.set()
        await self.may_end.wait()
        asyncio.get_running_loop().call_soon(self.judged.set)
        return Outcome(adopted=True, reason="r")


async def test_of_each_job_one_cut_is_suggested_at_a_time_and_a_job_that_ends_meanwhile_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    holding = SimpleNamespace(automation=Automation.ACT, tell_limit=lambda: None)
    run: Any = SimpleNamespace(
        name="j",
        step=3,
        job=job_context(job_record("j", JobState.RUNNING)),
        training=SimpleNamespace(changes=SimpleNamespace(homeless=set())),
        holding=holding,
    )
    situation = JobSituation(
        job="j", step=3, steps_left=99, microbatches=4, step_ms=400.0, stages=(), measured_steps=9
    )
    question = SimpleNamespace(question=SimpleNamespace(paces=()))
    monkeypatch.setattr(loop_service, "read_situation", lambda *seen: (situation, question))
    monkeypatch.setattr(loop_service, "mesh_figures", lambda mesh, queue: SimpleNamespace(idle=()))
    monkeypatch.setattr(loop_service, "best_cut", lambda question: None)
    monkeypatch.setattr(loop_service, "evaluate", lambda *seen: ([REMEDY], LoopMemory()))
    runs = {"j": run}
    term = Term(runs)
    mesh: Any = SimpleNamespace(automation=Automation.ACT)
    desk: Any = term
    queue: Any = None
    loop = OwnLoop(runs, mesh, queue, desk, term.confirmed, times=LoopTimes(every_s=0.001))
    with pytest.raises(Deposed):
        await asyncio.wait_for(loop.run(), PATIENCE_S)
    assert len(term.suggested) == 1
    assert "failed" not in capsys.readouterr().out
