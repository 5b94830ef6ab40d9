"""Drift is noticed soon, and seldom where there is none: the stated rate holds over seeds."""

from __future__ import annotations

import numpy as np
import pytest

from policies.built_in.transience import Transience
from policies.kit.drift import ForecastWatch
from policies.kit.engine import EngineConfig
from policies.numerics.drift import SETTLED, ErrorDrift, MissDrift
from schemas.changes import ChangeState
from schemas.job import JobEvent
from tests.builders.policies import forecast, stage_move
from tests.builders.policy_runs import PolicyRun

SEEDS = 300
SAMPLES = 1_000


def errors(seed: int, number: int, kind: str) -> list[float]:
    noise = np.random.default_rng(seed)
    draws = {
        "normal": lambda: np.abs(noise.normal(0, 1, number)),
        "heavy": lambda: noise.pareto(1.2, number),
        "ties": lambda: noise.integers(0, 3, number).astype(float),
        "periodic": lambda: np.abs(noise.normal(0, 1, number)) * (1 + 0.3 * np.sin(np.arange(number))),
    }
    return list(draws[kind]())


@pytest.mark.parametrize("kind", ["normal", "heavy", "ties", "periodic"])
def test_at_most_one_false_alarm_in_a_hundred_runs_of_a_thousand(kind: str) -> None:
    print("seeds", range(SEEDS))
    alarms = 0
    for seed in range(SEEDS):
        detector = ErrorDrift()
        for error in errors(seed, SAMPLES, kind):
            detector.add(error)
            if detector.drifted:
                alarms += 1
                break
    assert alarms <= 0.01 * SEEDS, f"{alarms} of {SEEDS}"


def test_errors_that_double_are_noticed_and_an_alarm_ends_when_they_are_as_before() -> None:
    delays = []
    for seed in range(20):
        detector, noise = ErrorDrift(), np.random.default_rng(seed)
        for error in errors(seed, 300, "normal"):
            detector.add(error)
        assert not detector.drifted
        for number in range(1, 400):
            detector.add(abs(2.5 * noise.normal()))
            if detector.drifted:
                delays.append(number)
                break
        for error in errors(seed + 1000, SETTLED + 200, "normal"):
            detector.add(error)
        assert not detector.drifted, f"seed {seed}"
    assert len(delays) == 20
    assert np.median(delays) <= 40, delays


def test_what_is_not_finite_is_as_large_an_error_as_can_be() -> None:
    detector = ErrorDrift.of(errors(1, 100, "normal"))
    for _ in range(8):
        detector.add(float("nan"))
    assert detector.drifted
    again = ErrorDrift()
    again.restore(detector.as_data())
    assert again == detector
    with pytest.raises(ValueError, match="out of order"):
        again.restore({**detector.as_data(), "errors": [2.0, 1.0]})


def test_forecasts_that_miss_more_often_than_not() -> None:
    print("seeds", range(SEEDS))
    alarms = 0
    for seed in range(SEEDS):
        noise, watch = np.random.default_rng(seed), MissDrift()
        for _ in range(10):
            watch.add(miss=bool(noise.random() < 0.5))
        alarms += watch.drifted
    assert alarms <= 0.01 * SEEDS
    watch = MissDrift()
    for _ in range(12):
        watch.add(miss=True)
    assert watch.drifted
    for _ in range(9):
        watch.add(miss=False)
    assert not watch.drifted


def test_a_modules_forecasts_are_watched_in_the_jobs_events_each_once() -> None:
    watch = ForecastWatch("m")
    for step in range(14):
        change = stage_move(
            by="m" if step < 13 else "other",
            step=step,
            forecast=forecast(step_before_s=1.0, step_after_s=0.5),
            state=ChangeState.NO_BETTER,
            before_s=1.0,
            after_s=0.9,
        )
        for _ in range(2):
            watch.take(JobEvent(job="j", kind="change", at=float(step), change=change))
    assert watch.reason == "13 of 13 forecasts of a step missed by more than 15%"


def test_a_module_whose_forecasts_no_longer_fit_says_so_and_is_less_sure() -> None:
    """By a built-in module: outages of 4 s become such of 12 s."""
    noise, run = np.random.default_rng(7), PolicyRun(Transience(), EngineConfig(max_per_s=100))

    def outages(number: int, mean_s: float) -> None:
        for _ in range(number):
            run.samples(j_s0_r0=10.0, j_s0_r1=10.0, j_s1_r0=10.0)
            for _ in range(int(mean_s * noise.uniform(0.9, 1.1))):
                run.now += 1.0
                run.samples(j_s0_r0=10.0, j_s1_r0=10.0)

    outages(80, 5.0)
    assert run.engine.drift(into=[]) == ""
    [before, *_] = run.decide()
    outages(30, 14.0)
    assert run.engine.drift(into=[]).startswith("outages last longer than they did, usually ")
    run.now += 30.0
    run.samples(j_s0_r0=10.0, j_s1_r0=10.0)
    [after, *_] = run.decide()
    assert after.confidence <= 0.5 < before.confidence
    assert "; less sure: outages last longer than they did" in after.reason
