"""Policy and orchestrator together, in virtual time: do moves find the right shape, and then stop?

The policy hears what instances and the orchestrator tell, noise and all; its suggestions go by the
orchestrator's rules; a move takes a second, in which both stages go on without the one that moves.
"""

from __future__ import annotations

import random

import pytest

from bus import subjects
from bus.subject_row import Subject
from entities.orchestrator.membership.stage_moves import StageMembers, direction, impossible
from entities.orchestrator.planning.change_account import ChangeAccount
from policies.built_in.stage_rebalancing import StageRebalancing
from policies.kit.engine import Engine, EngineConfig, Event
from policies.numerics.allocation.stage_balance import (
    MoveLimits,
    Situation,
    StageSituation,
    Worker,
    best_move,
    makespan_ms,
)
from schemas.base import Message
from schemas.changes import ChangeState, JobChange
from schemas.job import JobEvent, JobState, StepResult
from schemas.policy import MoveInstance, PolicySuggestion
from tests.builders.telemetry import sample

MICROBATCHES = 48
STEPS = 3000


class Pipeline:
    """Stages of unequal cost on unequal devices. `slots`: SID → how many times as long its device takes."""

    def __init__(
        self,
        seed: int,
        costs: list[float],
        slots: dict[str, float],
        noise: float,
        overhead_s: float = 0.03,
        move_s: float = 1.0,
    ) -> None:
        self.draw = random.Random(seed)
        self.costs, self.slots, self.noise = costs, slots, noise
        self.overhead_s, self.move_s = overhead_s, move_s
        self.engine = Engine(StageRebalancing(), EngineConfig())
        self.moves = ChangeAccount()
        self.now = 0.0
        self.step = 0
        self.arrives: tuple[float, str, float] | None = None
        self.carried_out: list[tuple[int, int]] = []
        self._number = 100
        self.tell(kind="state", state=JobState.RUNNING, total_steps=STEPS)

    def stage(self, stage: int) -> list[str]:
        return [sid for sid in self.slots if sid.startswith(f"j-s{stage}-")]

    def time_of(self, sid: str) -> float:
        """Milliseconds per microbatch, in truth."""
        return self.costs[int(sid[3])] * self.slots[sid]

    def hear(self, row: Subject, message: Message) -> None:
        self.engine.take([Event(row=row, message=message, id="e", at=self.now)])

    def tell(self, **fields: object) -> None:
        self.hear(subjects.JOB_EVENT, JobEvent.model_validate({"job": "j", "at": self.now, **fields}))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._one_step()

    def step_s(self) -> float:
        """Without noise."""
        spans = [
            makespan_ms([self.time_of(sid) for sid in self.stage(stage)], MICROBATCHES)
            for stage in range(len(self.costs))
        ]
        return max(spans) / 1e3 + self.overhead_s

    def _noisy(self, value: float) -> float:
        return value * self.draw.uniform(1 - self.noise, 1 + self.noise)

    def _one_step(self) -> None:
        taken_s = self._noisy(self.step_s())
        self.now += taken_s
        if self.arrives is not None and self.arrives[0] <= self.now:
            _, sid, pace = self.arrives
            self.slots[sid], self.arrives = pace, None
        shares = {}
        for stage, cost in enumerate(self.costs):
            for sid in self.stage(stage):
                shares[sid] = 1
                measured = self._noisy(self.time_of(sid))
                self.hear(
                    subjects.INSTANCE_SAMPLE,
                    sample(sid, step=self.step, service_ms=measured, stage_cost_ms=cost, state_bytes=10**6),
                )
        first = self.stage(0)[0]
        shares[first] += MICROBATCHES * len(self.costs) - sum(shares.values())
        result = StepResult(
            step=self.step,
            loss=1.0,
            gradient_norm=1.0,
            learning_rate=0.1,
            tokens=1,
            step_s=taken_s,
            tokens_per_s=1.0,
            shares=shares,
        )
        self.tell(kind="step", result=result, total_steps=STEPS)
        news = self.moves.decided(result)
        if news is not None:
            self.tell(kind="change", change=news)
        self.step += 1
        for suggestion in self.engine.decide(self.now).suggestions:
            self.engine.published(suggestion, f"s{self.step}", self.now)
            self._asked(suggestion)

    def _asked(self, suggestion: PolicySuggestion) -> None:
        move = suggestion.action
        assert isinstance(move, MoveInstance)
        crew = StageMembers(
            working={stage: self.stage(stage) for stage in range(len(self.costs))},
            coming=() if self.arrives is None else (self.arrives[1],),
        )
        here = int(move.sid[3])
        ways = direction(here, move.stage), direction(move.stage, here)
        why = impossible(move.sid, move.stage, crew) or self.moves.obstacle()
        if why or self.moves.unwise("move", *ways, move.forecast):
            return
        self._number += 1
        newcomer = f"j-s{move.stage}-r{self._number}"
        self.carried_out.append((here, move.stage))
        began = self.moves.begin(
            JobChange(
                sid=move.sid,
                what=f"{move.sid} → {newcomer}",
                direction=ways[0],
                reverse=ways[1],
                newcomers=(newcomer,),
                from_stage=here,
                to_stage=move.stage,
                step=self.step,
                by="m",
                forecast=move.forecast,
            )
        )
        self.tell(kind="change", change=began)
        self.arrives = (self.now + self.move_s, newcomer, self.slots.pop(move.sid))
        assert all(self.stage(stage) for stage in range(len(self.costs)))

    def could_be_better(self) -> bool:
        """Whether some move would still be worth it, by what nobody can measure."""
        truth = Situation(
            stages={
                stage: StageSituation(
                    workers=tuple(Worker(sid=sid, service_ms=self.time_of(sid)) for sid in self.stage(stage)),
                    cost_ms=cost,
                )
                for stage, cost in enumerate(self.costs)
            },
            microbatches=MICROBATCHES,
            step_s=self.step_s(),
            steps_left=STEPS,
            bytes_per_s=1e8,
        )
        return not isinstance(best_move(truth, MoveLimits(min_improvement=0.2)), str)


@pytest.mark.parametrize("seed", range(12))
def test_moves_find_a_shape_that_no_move_improves_and_then_stop(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.uniform(4, 40) for _ in range(draw.choice([2, 3, 4]))]
    slots = {
        f"j-s{stage}-r{number}": draw.uniform(0.8, 1.5)
        for stage in range(len(costs))
        for number in range(draw.randint(1, 4))
    }
    pipeline = Pipeline(seed, costs, slots, noise=0.05)
    before_s, wrong = pipeline.step_s(), pipeline.could_be_better()
    pipeline.run(240)
    count = len(pipeline.carried_out)
    note = f"seed {seed}: {pipeline.carried_out}, {before_s:.3f} → {pipeline.step_s():.3f} s"
    assert pipeline.step_s() <= before_s * 1.001, note
    assert pipeline.carried_out or not wrong, note
    assert not pipeline.could_be_better(), note
    assert all((there, here) not in pipeline.carried_out for here, there in pipeline.carried_out), note
    assert all(move.state is ChangeState.BETTER for move in pipeline.moves.history), note
    pipeline.run(60)
    assert len(pipeline.carried_out) == count, note


@pytest.mark.parametrize("seed", range(4))
def test_equal_stages_stay_as_they_are(seed: int) -> None:
    slots = {f"j-s{stage}-r{number}": 1.0 for stage in range(3) for number in range(2)}
    pipeline = Pipeline(seed, [20.0] * 3, slots, noise=0.2)
    pipeline.run(100)
    assert pipeline.carried_out == [], f"seed {seed}"


def test_when_devices_change_an_instance_may_come_back() -> None:
    """A stage that becomes slow gets help; when the other one is the slow one, it gives it back."""
    slots = {"j-s0-r0": 1.0, "j-s0-r1": 1.0, "j-s1-r0": 1.0, "j-s1-r1": 1.0}
    pipeline = Pipeline(1, [20.0, 20.0], slots, noise=0.05)
    pipeline.run(60)
    assert pipeline.carried_out == []
    pipeline.slots |= {"j-s1-r0": 4.0, "j-s1-r1": 4.0}
    pipeline.run(120)
    assert pipeline.carried_out == [(0, 1)]
    pipeline.slots |= dict.fromkeys(pipeline.stage(1), 1.0) | dict.fromkeys(pipeline.stage(0), 4.0)
    pipeline.run(200)
    assert pipeline.carried_out[:2] == [(0, 1), (1, 0)]
