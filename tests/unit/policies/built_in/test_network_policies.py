"""checkpoint-interval, transience, routing-bandit and topology-scoring as the engine runs them."""

from __future__ import annotations

import pytest

from bus import subjects
from dmsc.process.policy_loading import BUILT_IN, load_policy
from policies.built_in.checkpoint_interval import CheckpointInterval
from policies.built_in.routing_bandit import RoutingBandit, RoutingBanditConfig
from policies.built_in.topology_scoring import TopologyScoring
from policies.built_in.transience import Transience
from policies.kit.engine import EngineConfig
from policies.kit.policy import Policy
from schemas.job import JobState
from schemas.policy import AvoidInstance, ExpectFailures, SetWeights
from schemas.signals import LinkReport, QosReport
from schemas.telemetry import LinkFigures
from tests.builders.policy_runs import PolicyRun


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_policy_loads_under_its_own_name(name: str) -> None:
    assert load_policy(name).name == name


def run_of(policy: Policy) -> PolicyRun:
    return PolicyRun(policy, EngineConfig(max_per_s=100), now=1000.0)


# --- checkpoint interval ------------------------------------------------------------------------------
def test_failures_that_become_frequent_are_told_and_a_quiet_time_is_too() -> None:
    run = run_of(CheckpointInterval())
    run.event("state", state=JobState.RUNNING)
    for _ in range(8):
        run.now += 600.0
        run.event("recovery", text="planned again")
        run.now += 1.0
        run.event("recovery", text="resumed")  # of the same failure
    [first] = run.decide()
    assert isinstance(first.action, ExpectFailures)
    assert 300 < first.action.between_s < 7200
    assert first.reason.startswith("8 failures, the last 1 s ago")
    run.now += 60.0
    run.step(9, 1.0)
    assert run.decide() == [], "nothing new to say"
    run.now += 86_400.0
    run.step(10, 1.0)
    [later] = run.decide()
    assert isinstance(later.action, ExpectFailures)
    assert later.action.between_s > 3 * first.action.between_s


def test_one_failure_is_left_to_the_orchestrators_own_mean() -> None:
    run = run_of(CheckpointInterval())
    run.event("state", state=JobState.RUNNING)
    run.now += 600.0
    run.event("recovery")
    assert run.decide() == []


# --- transience ---------------------------------------------------------------------------------------
def test_a_silent_instance_is_waited_for_and_then_avoided() -> None:
    run = run_of(Transience())
    for _ in range(5):
        run.now += 1.0
        run.samples(j_s0_r0=10.0, j_s0_r1=10.0)
    assert run.decide() == []
    for _ in range(30):
        run.now += 1.0
        run.samples(j_s0_r0=10.0)
        if run.decide():
            break
    [suggestion] = run.said
    assert suggestion.action == AvoidInstance(sid="j-s0-r1")
    assert "worth waiting" in suggestion.reason


def test_where_most_are_silent_it_is_the_module_that_hears_nothing() -> None:
    run = run_of(Transience())
    for _ in range(5):
        run.now += 1.0
        run.samples(j_s0_r0=10.0, j_s0_r1=10.0, j_s1_r0=10.0)
    for _ in range(60):
        run.now += 1.0
        run.samples(j_s0_r0=10.0)
        assert run.decide() == []


def test_what_flaps_is_avoided_though_it_is_back_and_trusted_again_later() -> None:
    run = run_of(Transience())
    for _ in range(5):
        run.samples(j_s0_r0=10.0, j_s0_r1=10.0)
        for _ in range(5):
            run.now += 1.0
            run.samples(j_s0_r0=10.0)
    run.samples(j_s0_r0=10.0, j_s0_r1=10.0)
    [suggestion] = run.decide()
    assert suggestion.action == AvoidInstance(sid="j-s0-r1")
    assert suggestion.reason.startswith("flaps")
    for _ in range(500):
        run.now += 1.0
        run.samples(j_s0_r0=10.0, j_s0_r1=10.0)
    assert run.decide() == []


# --- routing bandit -----------------------------------------------------------------------------------
def played(run: PolicyRun, blocks: int, seconds: dict[int, float], block: int = 3) -> None:
    """Steps that take what the arm in force lets them take; the arm is read from the suggestion's reason."""
    arm = 0
    for number in range(1, blocks * block + 1):
        run.now += 1.0
        run.samples(step=number, j_s0_r0=10.0, j_s0_r1=20.0)
        for suggestion in run.decide():
            arm = int(suggestion.reason.split("arm ")[1][0])
        run.step(number, seconds[arm])


def test_a_tilt_that_makes_steps_shorter_is_found_and_stays() -> None:
    run = run_of(RoutingBandit(RoutingBanditConfig(block_steps=3, settle_steps=1, margin=0.05)))
    played(run, 60, {0: 1.0, 1: 1.02, 2: 0.8, 3: 1.05})
    weights = [one.action.weights for one in run.said[-5:] if isinstance(one.action, SetWeights)]
    assert any(table["j-s0-r1"] > table["j-s0-r0"] for table in weights), "the slow one gets more"
    assert sum("arm 2" in one.reason for one in run.said) > sum("arm 3" in one.reason for one in run.said)


def test_in_shadow_the_trials_teach_nothing() -> None:
    run = run_of(RoutingBandit(RoutingBanditConfig(block_steps=3, settle_steps=1, margin=1.0)))
    for number in range(1, 61):
        run.now += 1.0
        run.samples(step=number, j_s0_r0=10.0, j_s0_r1=20.0)
        if run.decide():
            run.answer(adopted=False)
        run.step(number, 1.0)
    [trial] = run.engine.policy._trials.values()
    assert all(bandit.excess == 0 for bandit in trial.bandits.values())


# --- topology scoring ---------------------------------------------------------------------------------
def test_a_slow_link_gets_less_and_equal_ones_are_left_alone() -> None:
    run = run_of(TopologyScoring())
    links = tuple(
        LinkReport(sender="j-s0-r0", receiver=f"j-s1-r{one}", figures=LinkFigures(transfer_ms=ms))
        for one, ms in enumerate((5.0, 40.0))
    )
    for _ in range(4):
        run.now += 1.0
        run.samples(j_s0_r0=10.0, j_s1_r0=20.0, j_s1_r1=20.0)
    assert run.decide() == []
    run.now += 1.0
    run.take(subjects.QOS_REPORT, QosReport(sid="router-a", cluster="a", window_s=1.0, job="j", links=links))
    run.samples(j_s0_r0=10.0, j_s1_r0=20.0, j_s1_r1=20.0)
    [suggestion] = run.decide()
    assert isinstance(suggestion.action, SetWeights)
    assert suggestion.action.stage == 1
    share = suggestion.action.weights["j-s1-r1"] / 2
    assert share == pytest.approx(1 / 3, abs=0.05)  # 40 ms over the link against 20 ms of the other's device
    assert "2 of 2 links measured" in suggestion.reason
