"""When the trained network speaks: a slow slot and a free one; never in calm, nor by what is no figure."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from bus import subjects
from policies.built_in.change_outcomes import ChangeOutcomes
from policies.numerics.allocation.outcome_network import untrained
from schemas.actions import Migrate, NoAction
from schemas.envelope import EntityKind
from schemas.job import JobState
from schemas.policy import PolicySuggestion
from schemas.registry import Capability, Endpoint
from schemas.signals import ComputeNotification, StageLoad
from tests.builders.policy_runs import PolicyRun
from tests.builders.records import advertisement, service
from tests.builders.telemetry import sample

MICROBATCHES, USUAL_MS = 12, 60.0
SIDS = ("j-s0-r0", "j-s0-r1", "j-s1-r0", "j-s1-r1")


class Run(PolicyRun):
    """A job of two stages of two, one step after another as long as the slowest stage takes."""

    def __init__(self, policy: ChangeOutcomes | None = None, *, room: bool = True) -> None:
        super().__init__(policy or ChangeOutcomes())
        self.number, self.done = 0, dict.fromkeys(SIDS, 0)
        self.event("state", state=JobState.RUNNING, total_steps=5000)
        agent = service(
            "agent-east-spare",
            kind=EntityKind.CLUSTER,
            endpoint=Endpoint(cluster="east", node="spare"),
            capability=Capability(slots=1 if room else 0),
        )
        self.take(subjects.ADVERTISEMENT, advertisement(agent))

    def step_of(self, noise: float = 0.0, draw: random.Random | None = None, **slow: float):
        """A step with instances so many times as slow (SID with `_` for `-`); what is suggested then."""
        factors = {sid: slow.get(sid.replace("-", "_"), 1.0) for sid in SIDS}
        if draw is not None:
            factors = {sid: factor * math.exp(draw.gauss(0, noise)) for sid, factor in factors.items()}
        shares: dict[str, int] = {}
        step_s = 0.0
        for pair in (SIDS[:2], SIDS[2:]):
            rates = [1 / factors[sid] for sid in pair]
            first = round(MICROBATCHES * rates[0] / sum(rates))
            shares |= {pair[0]: first, pair[1]: MICROBATCHES - first}
            step_s = max([step_s, *(shares[sid] * factors[sid] * USUAL_MS / 1e3 for sid in pair)])
        step_s += USUAL_MS / 1e3 + 0.03
        self.now += step_s
        for sid in SIDS:
            self.done[sid] += shares[sid]
            measured = {"microbatches": self.done[sid], "stage_cost_ms": USUAL_MS, "step": self.number}
            told = sample(sid, service_ms=factors[sid] * USUAL_MS, **measured)
            self.take(subjects.INSTANCE_SAMPLE, told)
        self.step(self.number, step_s, shares=shares)
        self.number += 1
        return self.decide()


def slowed(run: Run, steps: int = 20) -> list[PolicySuggestion]:
    """Ten steps of calm, then one of four is four times as slow; what is suggested, while nobody answers."""
    for _ in range(10):
        assert run.step_of() == []
    return [suggestion for _ in range(steps) for suggestion in run.step_of(j_s0_r1=4.0)]


def test_a_slow_instance_is_suggested_for_a_free_slot_with_a_forecast_and_how_sure_it_is() -> None:
    said = slowed(Run())
    assert said
    (first, *_) = said
    assert isinstance(first.action, Migrate)
    assert (first.action.sid, first.scope) == ("j-s0-r1", "instance j-s0-r1")
    forecast = first.action.forecast
    assert 0.5 < forecast.step_after_s / forecast.step_before_s < 0.9
    assert forecast.steps_left <= math.ceil(
        untrained().horizon_s / forecast.step_after_s
    )  # it promises no more
    assert 0.75 <= first.confidence < 1
    assert "j-s0-r1 to another slot: +" in first.reason
    assert f"it pays with a probability of {first.confidence:.0%}" in first.reason


def test_the_same_messages_give_the_same_bytes() -> None:
    def story(seed: int) -> list[bytes]:
        run, draw = Run(), random.Random(seed)
        for _ in range(40):
            run.step_of(0.05, draw, j_s1_r0=draw.choice((1.0, 1.0, 3.0)))
        return [suggestion.model_dump_json().encode() for suggestion in run.said]

    assert story(3) == story(3)
    assert any(story(seed) for seed in range(3))


@pytest.mark.parametrize("seed", range(3))
def test_it_says_nothing_in_calm_in_500_noisy_steps(seed: int) -> None:
    run, draw = Run(), random.Random(f"calm {seed}")
    for _ in range(500):
        assert run.step_of(0.05, draw) == [], f"seed {seed}, step {run.number}"


def test_without_a_free_slot_and_with_equal_stages_it_says_nothing() -> None:
    assert slowed(Run(room=False)) == []


def test_it_keeps_to_algorithms_that_it_has_seen() -> None:
    run = Run()
    loads = tuple(StageLoad(job="j", stage=stage, algorithm="round-robin", instances=2) for stage in (0, 1))
    run.take(
        subjects.COMPUTE,
        ComputeNotification(router="r", cluster="east", revision=1, entries=(), stages=loads),
    )
    assert slowed(run) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e12])
def test_by_figures_that_are_none_it_says_so_once_and_nothing_else(bad: float) -> None:
    run = Run()
    said = []
    for number in range(40):
        said += run.step_of(j_s0_r1=bad if number >= 8 else 1.0) if number < 8 else broken_step(run, bad)
    (only,) = said
    assert isinstance(only.action, NoAction)
    assert only.reason == f"no forecast: j-s0-r1 has reported a service time of {bad:g} ms"
    assert "\n" not in only.reason


def broken_step(run: Run, bad: float) -> list[PolicySuggestion]:
    """A second in which one instance reports what is no service time."""
    run.now += 1.0
    for sid in SIDS:
        told = sample(sid, service_ms=bad if sid == "j-s0-r1" else USUAL_MS, step=run.number)
        run.take(subjects.INSTANCE_SAMPLE, told)
    run.step(run.number, 1.0, shares=dict.fromkeys(SIDS, MICROBATCHES // 2))
    run.number += 1
    return run.decide()


def test_an_instance_that_no_longer_reports_ends_its_forecasts() -> None:
    run = Run()
    for _ in range(10):
        run.step_of()
    for _ in range(40):
        run.now += 1.0
        silent = [sample(sid, service_ms=USUAL_MS, step=run.number) for sid in SIDS if sid != "j-s0-r1"]
        run.take(subjects.INSTANCE_SAMPLE, *silent)
        run.step(run.number, 1.0, shares=dict.fromkeys(SIDS, MICROBATCHES // 2))
        run.number += 1
        assert run.decide() == []


def test_what_it_says_is_learnt() -> None:
    """Before its training the same module, with the same features and thresholds, says something else."""
    learnt = [(one.action, one.confidence) for one in slowed(Run())]
    for seed in range(3):
        policy = ChangeOutcomes(network=untrained(seed))
        assert [(one.action, one.confidence) for one in slowed(Run(policy))] != learnt


def test_the_network_does_not_depend_on_the_order_of_instances() -> None:
    from policies.numerics.allocation.outcome_network import ChangeGraphs, trained

    draw = np.random.default_rng(5)
    nodes, job = draw.normal(size=(5, 13)), draw.normal(size=(1, 11))
    stages, marks = np.array([0, 0, 1, 1, 1]), np.zeros((1, 5, 2))
    marks[0, 3, 0] = marks[0, 2:, 1] = 1
    order = np.array([4, 1, 3, 0, 2])
    (one,) = trained().outcomes(ChangeGraphs(nodes, stages, marks, job))
    (other,) = trained().outcomes(ChangeGraphs(nodes[order], stages[order], marks[:, order], job))
    assert one.gain.mean == pytest.approx(other.gain.mean, abs=1e-5)
    assert one.step.width == pytest.approx(other.step.width, rel=1e-4)
