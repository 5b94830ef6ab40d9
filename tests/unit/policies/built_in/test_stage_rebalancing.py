"""When the policy speaks: enough evidence, the same crew, one stage behind the others."""

from __future__ import annotations

import math
import random

import pytest

from bus import subjects
from policies.built_in.stage_rebalancing import StageRebalancing
from policies.kit.engine import Engine, EngineConfig, Event
from schemas.job import JobEvent, JobState, StepResult
from schemas.policy import MoveInstance
from schemas.registry import InstanceState
from schemas.signals import ComputeEntry, ComputeNotification
from schemas.stage_move import MoveState, StageMove
from schemas.telemetry import LinkSample
from tests.builders.telemetry import sample

MICROBATCHES = 12


class Run:
    """A job's steps, one a second, as modules hear of them."""

    def __init__(self, *, total_steps: int = 500) -> None:
        self.engine = Engine(StageRebalancing(), EngineConfig())
        self.now = 0.0
        self.step = 0
        self.total_steps = total_steps
        self.event(kind="state", state=JobState.RUNNING, total_steps=total_steps)

    def event(self, **fields) -> None:
        message = JobEvent(job="j", at=self.now, **fields)
        self.engine.take([Event(row=subjects.JOB_EVENT, message=message, id="e", at=self.now)])

    def entry(self, sid: str, weight: float) -> None:
        entry = ComputeEntry(
            sid=sid, incarnation="i1", job="j", stage=0, state=InstanceState.ACTIVE, weight=weight
        )
        told = ComputeNotification(router="r", cluster="east", revision=1, entries=(entry,))
        self.engine.take([Event(row=subjects.COMPUTE, message=told, id="c", at=self.now)])

    def second(self, step_s: float = 0.8, costs: tuple[float, float] = (10.0, 60.0), **service_ms: float):
        """Two stages share all microbatches evenly; returns what is suggested then."""
        self.now += 1.0
        times = {sid.replace("_", "-"): ms for sid, ms in service_ms.items()}
        links = (LinkSample(peer="p", sent_bytes=2_000_000, transfers=2, transfer_ms=20.0),)
        self.engine.take(
            Event(
                row=subjects.INSTANCE_SAMPLE,
                message=sample(
                    sid,
                    step=self.step,
                    service_ms=ms,
                    stage_cost_ms=costs[int(sid[3])],
                    state_bytes=50_000_000,
                    links=links,
                ),
                id="s",
                at=self.now,
            )
            for sid, ms in times.items()
        )
        shares = {}
        for stage in (0, 1):
            sids = [sid for sid in times if sid.startswith(f"j-s{stage}")]
            shares |= {sid: MICROBATCHES // len(sids) for sid in sids}
        result = StepResult(
            step=self.step,
            loss=1.0,
            gradient_norm=1.0,
            learning_rate=0.1,
            tokens=1,
            step_s=step_s,
            tokens_per_s=1.0,
            shares=shares,
        )
        self.event(kind="step", result=result, total_steps=self.total_steps)
        self.step += 1
        found = self.engine.decide(self.now).suggestions
        for suggestion in found:
            self.engine.published(suggestion, f"id{self.step}", self.now)
        return found


SKEWED = {"j_s0_r0": 10.0, "j_s0_r1": 10.0, "j_s0_r2": 10.0, "j_s1_r0": 60.0}


def test_after_eight_steps_by_the_same_crew_it_says_who_where_and_what_for() -> None:
    run = Run()
    for _ in range(7):
        assert run.second(**SKEWED) == []
    [suggestion] = run.second(**SKEWED)
    assert isinstance(suggestion.action, MoveInstance)
    assert (suggestion.action.sid, suggestion.action.stage) == ("j-s0-r2", 1)
    forecast = suggestion.action.forecast
    assert forecast.step_before_s == pytest.approx(0.8)
    assert forecast.step_after_s == pytest.approx(0.8 - 0.72 + 0.36)
    assert forecast.cost_s == pytest.approx(1.5)  # a second, and 50 MB at 100 MB/s
    assert suggestion.confidence == 0.95
    assert suggestion.reason == (
        "stage 0: 3 × 10.0 ms, stage 1: 1 × 60.0 ms; with j-s0-r2 in stage 1 a step would take 0.440 s "
        "instead of 0.800 s (bound 16.7 → 33.3 microbatches/s), for at most 1.5 s; 177.1 s in the 492 steps "
        "that are left"
    )


def test_it_does_not_insist() -> None:
    run = Run()
    said = [bool(run.second(**SKEWED)) for _ in range(30)]
    assert [index for index, one in enumerate(said) if one] == [7, 17, 27]


def test_another_crew_and_news_of_a_move_begin_the_evidence_anew() -> None:
    run = Run()
    for _ in range(6):
        run.second(**SKEWED)
    without = {sid: ms for sid, ms in SKEWED.items() if sid != "j_s0_r2"}
    for _ in range(6):  # the one that is missing is still sampled for a while: no decision
        assert run.second(**without) == []
    move = StageMove(
        sid="j-s0-r2", newcomer="j-s1-r1", from_stage=0, to_stage=1, step=9, by="m", state=MoveState.NO_BETTER
    )
    run.event(kind="rebalancing", move=move)
    for _ in range(7):
        assert run.second(**SKEWED) == []
    assert run.second(**SKEWED)


def test_a_standby_neither_counts_nor_moves() -> None:
    run = Run()
    with_standby = {"j_s0_r0": 10.0, "j_s0_r1": 10.0, "j_s1_r0": 60.0}
    run.second(**with_standby)
    run.entry("j-s0-r1", 0.0)
    for _ in range(20):
        assert run.second(**with_standby) == []


@pytest.mark.parametrize("seed", range(20))
def test_equal_stages_are_left_alone_under_noise(seed: int) -> None:
    draw, run = random.Random(seed), Run()
    sids = ["j_s0_r0", "j_s0_r1", "j_s1_r0", "j_s1_r1"]
    for _ in range(60):
        noisy = {sid: 20.0 * draw.uniform(0.7, 1.4) for sid in sids}
        found = run.second(0.2 * draw.uniform(0.8, 1.3), (20.0, 20.0), **noisy)
        assert found == [], f"seed {seed}: {found}"


@pytest.mark.parametrize("bad", [math.nan, -5.0, math.inf, 1e12])
def test_a_few_absurd_samples_change_nothing(bad: float) -> None:
    run, sane = Run(), {"j_s0_r0": 20.0, "j_s0_r1": 20.0, "j_s1_r0": 20.0, "j_s1_r1": 20.0}
    for second in range(40):
        measured = {**sane, "j_s1_r0": bad} if second % 5 == 4 else sane
        assert run.second(0.15, (20.0, 20.0), **measured) == []


def test_near_the_end_nothing_is_worth_it() -> None:
    run = Run(total_steps=12)
    for _ in range(11):
        assert run.second(**SKEWED) == []
