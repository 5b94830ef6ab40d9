"""When the policy speaks: enough evidence, the same crew, one stage behind the others."""

from __future__ import annotations

import math
import random

import pytest

from bus import subjects
from policies.built_in.stage_rebalancing import StageRebalancing
from schemas.changes import ChangeState
from schemas.job import JobState
from schemas.policy import MoveInstance
from schemas.signals import ComputeNotification
from schemas.telemetry import LinkSample
from tests.builders.policies import stage_move
from tests.builders.policy_runs import PolicyRun
from tests.builders.telemetry import compute, sample

MICROBATCHES = 12


class Run(PolicyRun):
    """A job's steps, one a second, as modules hear of them."""

    def __init__(self, *, total_steps: int = 500) -> None:
        super().__init__(StageRebalancing())
        self.number = 0
        self.total_steps = total_steps
        self.event("state", state=JobState.RUNNING, total_steps=total_steps)

    def entry(self, sid: str, weight: float) -> None:
        entries = (compute(sid, weight=weight, service_ms=0.0),)
        told = ComputeNotification(router="r", cluster="east", revision=1, entries=entries)
        self.take(subjects.COMPUTE, told)

    def second(self, step_s: float = 0.8, costs: tuple[float, float] = (10.0, 60.0), **service_ms: float):
        """Two stages share all microbatches evenly; returns what is suggested then."""
        self.now += 1.0
        times = {sid.replace("_", "-"): ms for sid, ms in service_ms.items()}
        links = (LinkSample(peer="p", sent_bytes=2_000_000, transfers=2, transfer_ms=20.0),)
        moved = {"step": self.number, "state_bytes": 50_000_000, "links": links}
        for sid, ms in times.items():
            told = sample(sid, service_ms=ms, stage_cost_ms=costs[int(sid[3])], **moved)
            self.take(subjects.INSTANCE_SAMPLE, told)
        shares = {}
        for stage in (0, 1):
            sids = [sid for sid in times if sid.startswith(f"j-s{stage}")]
            shares |= {sid: MICROBATCHES // len(sids) for sid in sids}
        self.step(self.number, step_s, total_steps=self.total_steps, shares=shares)
        self.number += 1
        return self.decide()


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
    move = stage_move(sid="j-s0-r2", step=9, state=ChangeState.NO_BETTER)
    run.event("change", change=move)
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
