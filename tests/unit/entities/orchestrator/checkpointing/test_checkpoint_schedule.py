"""When a checkpoint is due, and why."""

from __future__ import annotations

import math
from typing import Any

import pytest

from entities.orchestrator.checkpointing.checkpoint_schedule import (
    TREND_STEPS,
    Choice,
    Conditions,
    ScheduleTimes,
    choose,
    daly_interval_s,
    failures_between_s,
    loss_trend,
)
from entities.orchestrator.monitoring.hardware_risk import hardware_risk
from tests.builders.telemetry import qos_report

TIMES = ScheduleTimes()
FALLING = [10 * 0.9**step for step in range(TREND_STEPS)]


def auto(**given: Any) -> Choice:
    conditions = {
        "step": 500,
        "last_step": 0,
        "steps": 100_000,
        "step_s": 1.0,
        "cost_s": 2.0,
        "instances": 4,
        "losses": FALLING,
    }
    return choose("auto", Conditions(**{**conditions, **given}))


def between(instances: int, observed_s: float, failures: int) -> tuple[float, str]:
    return failures_between_s(instances, observed_s, failures, TIMES.prior_instance_s)


def test_a_number_is_taken_literally() -> None:
    due = [step for step in range(13) if choose(4, Conditions(step=step, last_step=0, steps=12)).due]
    assert due == [4, 8, 12]
    assert not choose(0, Conditions(step=4, last_step=0, steps=12)).due


def test_the_interval_is_young_s_where_cheap_and_never_beyond_the_time_between_failures() -> None:
    assert daly_interval_s(0.01, 86_400) == pytest.approx(math.sqrt(2 * 0.01 * 86_400), rel=1e-2)
    assert daly_interval_s(100, 50) == 50
    assert daly_interval_s(99, 50) < 60
    costs = [daly_interval_s(cost, 3_600) for cost in (0.1, 1, 10, 100)]
    assert costs == sorted(costs)


def test_failures_shorten_it_and_a_quiet_run_lengthens_it() -> None:
    quiet, _ = between(4, 0, 0)
    assert quiet == TIMES.prior_instance_s / 4
    assert between(4, 3_600, 3)[0] < quiet / 3
    assert between(4, 30 * 86_400, 0)[0] > quiet
    assert between(400, 0, 0)[0] == quiet / 100
    assert auto(failures=20).interval_steps < auto().interval_steps
    assert auto(cost_s=20.0).interval_steps > auto().interval_steps
    assert auto(step_s=10.0).interval_steps == pytest.approx(auto().interval_steps / 10, abs=1)


def test_it_is_due_once_the_interval_has_passed_since_the_last() -> None:
    interval = auto().interval_steps
    assert not auto(step=interval - 1).due
    assert auto(step=interval).due
    assert not auto(step=interval + 5, last_step=10).due
    assert auto(step=interval + 10, last_step=10).due
    assert not auto(step=interval, steps=interval).due, "the weights themselves are about to be written"


def test_the_first_comes_early_to_learn_what_it_costs() -> None:
    assert not auto(cost_s=None, step=int(TIMES.first_s) - 1).due
    first = auto(cost_s=None, step=int(TIMES.first_s))
    assert first.due
    assert "the first" in first.reason
    assert not auto(step_s=None).due


def test_the_reason_names_cost_failures_and_trend() -> None:
    assert "costs 2.0 s" in auto().reason
    assert "3 in 2.0 h, 4 instances" in auto(failures=3, observed_s=7_200).reason
    flat = auto(losses=[2.0] * TREND_STEPS)
    assert flat.interval_steps == pytest.approx(2 * auto().interval_steps, abs=1)
    assert "the loss is flat" in flat.reason


def test_a_failing_device_asks_for_one_at_once_and_for_more_after_it() -> None:
    signs = {"risk": 0.9, "risk_reason": "cluster a: a device at 94 °C"}
    now = auto(step=1, **signs)
    assert now.due
    assert "94 °C" in now.reason
    later = auto(step=1, risk_answered=True, **signs)
    assert not later.due
    assert later.interval_steps == round(daly_interval_s(2.0, TIMES.risky_s))
    assert not auto(step=1, risk=0.5).due


def test_trends() -> None:
    assert loss_trend(FALLING[:-1]) == "unknown"
    assert loss_trend(FALLING) == "falling"
    assert loss_trend([1.0] * TREND_STEPS) == "flat"
    assert loss_trend(FALLING[::-1]) == "rising"
    assert loss_trend([math.nan] * TREND_STEPS) == "unknown"


def test_hardware_risk() -> None:
    assert hardware_risk([]) == (0.0, "")
    assert hardware_risk([qos_report(), qos_report(temperature_c=70.0, ecc_errors=0)])[0] == 0.0
    warm, why = hardware_risk([qos_report(temperature_c=70.0), qos_report(temperature_c=93.0)])
    assert warm == pytest.approx(0.8)
    assert why == "cluster a: a device at 93 °C"
    assert hardware_risk([qos_report(temperature_c=93.0, ecc_errors=2)]) == (
        1.0,
        "cluster a: 2 uncorrected memory errors in this job",
    )


def test_what_a_module_expects_takes_the_place_of_the_observed_mean() -> None:
    alone = auto(step=1, failures=1, observed_s=86_400)
    often = auto(step=1, failures=1, observed_s=86_400, expected_s=600.0, expected_by="checkpoint-interval")
    assert often.interval_steps == round(daly_interval_s(2.0, 600.0)) < alone.interval_steps
    assert "expected by checkpoint-interval" in often.reason
