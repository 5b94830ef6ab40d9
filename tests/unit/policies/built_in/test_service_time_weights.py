"""Weights from measured service time (draft §5.4): when it speaks, what it says, when it keeps quiet."""

from __future__ import annotations

import random

import pytest

from bus import subjects
from policies.built_in.service_time_weights import ServiceTimeWeights
from schemas.signals import ComputeNotification, StageLoad
from tests.builders.policy_runs import PolicyRun


class Run(PolicyRun):
    """Second by second, with given service times per instance."""

    def __init__(self) -> None:
        super().__init__(ServiceTimeWeights())

    def second(self, **service_ms: float):
        self.now += 1.0
        self.samples(int(self.now), **service_ms)
        return self.decide()


def test_weights_are_inverse_to_the_service_time_and_the_reason_has_the_figures():
    run = Run()
    assert run.second(j_s0_r0=10.0, j_s0_r1=30.0) == []  # too few samples
    assert run.second(j_s0_r0=10.0, j_s0_r1=30.0) == []
    [suggestion] = run.second(j_s0_r0=10.0, j_s0_r1=30.0)
    assert suggestion.action.stage == 0
    assert suggestion.action.weights == {"j-s0-r0": 1.5, "j-s0-r1": 0.5}
    assert suggestion.reason == (
        "stage 0, mean service time per microbatch and share: j-s0-r0 10.0 ms (3 samples) → 75%, "
        "j-s0-r1 30.0 ms (3 samples) → 25%; largest change 50%"
    )
    assert suggestion.confidence == 0.95
    assert suggestion.input_revision == 3


def test_equal_workers_are_left_alone():
    run, noise = Run(), random.Random(1)
    for _ in range(60):
        assert run.second(j_s0_r0=10 + noise.uniform(-0.3, 0.3), j_s0_r1=10 + noise.uniform(-0.3, 0.3)) == []


def test_it_speaks_again_only_when_a_share_changes():
    run, noise = Run(), random.Random(1)
    said = []
    for second in range(25):
        slow = 30.0 if second < 15 else 10.0
        said += run.second(j_s0_r0=10 + noise.uniform(-0.2, 0.2), j_s0_r1=slow)
        if said and run.said and second == 3:
            run.answer(adopted=True)
    first, *later = said
    assert first.action.weights["j-s0-r1"] == pytest.approx(0.5, abs=0.02)
    assert later, "the recovery of r1 must be noticed"
    assert all(one.input_revision > 15 for one in later)
    assert later[-1].action.weights["j-s0-r1"] > 0.7


def test_unequal_weights_are_renewed_before_they_lapse_and_a_refusal_is_not_nagged_about():
    run = Run()
    times = [run.now for _ in range(70) if run.second(j_s0_r0=10.0, j_s0_r1=30.0)]
    assert times == [3.0, 33.0, 63.0]  # valid for 60 s, renewed after 30

    refused = Run()
    times = []
    for _ in range(20):
        if refused.second(j_s0_r0=10.0, j_s0_r1=30.0):
            times.append(refused.now)
            refused.answer(adopted=False)
    assert times == [3.0, 8.0, 13.0, 18.0]


def test_a_stage_of_one_and_an_instance_that_has_fallen_silent_are_not_judged():
    run = Run()
    for _ in range(10):
        assert run.second(j_s0_r0=10.0) == []
    other = Run()
    for _ in range(2):
        other.second(j_s0_r0=10.0, j_s0_r1=30.0)
    for _ in range(16):
        other.second(j_s0_r0=10.0)
    assert other.second(j_s0_r0=10.0) == []


def test_it_keeps_quiet_where_routing_measures_by_itself():
    """Both together would count service times twice (ADR-0016)."""
    run = Run()
    for algorithm, said in (("expected-completion", 0), ("least-outstanding", 1)):
        load = StageLoad(job="j", stage=0, algorithm=algorithm, instances=2)
        told = ComputeNotification(router="router-a", cluster="a", revision=1, entries=(), stages=(load,))
        run.second(j_s0_r0=10.0, j_s0_r1=30.0)
        run.take(subjects.COMPUTE, told)
        for _ in range(4):
            run.second(j_s0_r0=10.0, j_s0_r1=30.0)
        assert len(run.said) == said, algorithm
