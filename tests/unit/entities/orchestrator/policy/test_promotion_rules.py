"""A promoted version gives way to its predecessor when it is worse, and only then (ADR-0021)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entities.orchestrator.policy import module_reputation
from entities.orchestrator.policy.arbitration import arbitrate, lapse, register
from entities.orchestrator.policy.arbitration_state import ArbitrationState, withdraw
from entities.orchestrator.policy.promotion_rules import (
    PromotionConfig,
    PromotionTrial,
    disagreeing,
    promote,
    roll_back,
    verdict,
)
from entities.orchestrator.policy.suggestion_rules import JobFacts
from schemas.errors import BadInput, Conflict, NotFound
from schemas.policy import (
    ModuleLifecycle,
    ModuleRecord,
    ModuleState,
    PolicyScore,
    PolicySuggestion,
    SetWeights,
)
from tests.builders import policies

CONFIG = PromotionConfig()
BOTH = {"1": ModuleState.ACTIVE, "2": ModuleState.SHADOW}


def promoted(standings: dict[str, ModuleState] = BOTH, record: ModuleRecord | None = None) -> ModuleRecord:
    return promote(record, standings, "m", "2", by="ada", reason="better in replay", now=100.0)


def score(version: str, value: float | None, number: int, at: float = 200.0) -> PolicyScore:
    right = None if value is None else value > 0.5
    shadow = version == "1"
    return policies.score(version, value, number, at=at, shadow=shadow, adopted=not shadow, right=right)


def trial_of(
    new: list[float], old: list[float], config: PromotionConfig = CONFIG
) -> tuple[PromotionTrial, ModuleRecord]:
    record = promoted()
    trial = PromotionTrial(since=record.since)
    for version, values in (("2", new), ("1", old)):
        for number, value in enumerate(values):
            assert trial.take(score(version, value, number), record, config)
    return trial, record


SCORES = st.lists(st.floats(0, 1), min_size=20, max_size=60)


@given(SCORES, SCORES)
def test_it_only_gives_way_to_a_better_one(new: list[float], old: list[float]) -> None:
    why = verdict(*trial_of(new, old), CONFIG)
    if why:
        assert sum(old) / len(old) - sum(new) / len(new) >= CONFIG.margin
    assert not (why and verdict(*trial_of(old, new), CONFIG)), "not both ways"


@given(st.lists(st.floats(0, 1), max_size=19), SCORES)
def test_too_few_scores_say_nothing(new: list[float], old: list[float]) -> None:
    assert verdict(*trial_of(new, old), CONFIG) == ""
    assert verdict(*trial_of(old, new), CONFIG) == ""


@given(st.floats(0.3, 0.6), st.integers(0, 1000))
def test_one_that_is_clearly_worse_gives_way(new: float, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    ours = [new - 0.25 + chance.uniform(-0.05, 0.05) for _ in range(40)]
    theirs = [new + 0.25 + chance.uniform(-0.05, 0.05) for _ in range(40)]
    assert "on the same traffic" in verdict(*trial_of(ours, theirs), CONFIG)


@given(st.lists(st.floats(0, 1), min_size=20, max_size=40), st.randoms(use_true_random=False))
def test_the_order_of_scores_does_not_matter_within_the_window(
    values: list[float], chance: random.Random
) -> None:
    shuffled = list(values)
    chance.shuffle(shuffled)
    better = [min(1.0, value + 0.4) for value in values]
    first = bool(verdict(*trial_of(values, better), CONFIG))
    assert first is bool(verdict(*trial_of(shuffled, better), CONFIG))


def test_only_the_latest_count() -> None:
    config = PromotionConfig(min_scores=5, window=10)
    assert verdict(*trial_of([0.9] * 30 + [0.1] * 10, [0.6] * 40, config), config)
    assert not verdict(*trial_of([0.1] * 30 + [0.9] * 10, [0.6] * 40, config), config)


def test_scores_of_before_of_others_and_repeated_ones_do_not_count() -> None:
    record = promoted()
    trial = PromotionTrial(since=record.since)
    assert not trial.take(score("2", 0.5, 1, at=99.0), record, CONFIG), "suggested before the promotion"
    assert not trial.take(score("3", 0.5, 1), record, CONFIG)
    assert not trial.take(score("2", None, 1), record, CONFIG)
    assert trial.take(score("2", 0.5, 1), record, CONFIG)
    assert not trial.take(score("2", 0.5, 1), record, CONFIG)


def test_promotion_notes_who_was_active_and_puts_the_new_one_on_trial() -> None:
    record = promoted()
    assert (record.active, record.previous, record.trial, record.by) == ("2", "1", True, "ada")
    assert promoted(record=record) is record, "repeated, it changes nothing"
    alone = promoted({"2": ModuleState.SHADOW})
    assert (alone.previous, alone.trial) == ("", False)


def test_only_a_version_that_runs_can_be_promoted() -> None:
    with pytest.raises(NotFound, match=r"m 2 does not run \(running versions: 1\)"):
        promoted({"1": ModuleState.ACTIVE})
    with pytest.raises(Conflict, match="m 2 is suspended"):
        promoted({"1": ModuleState.ACTIVE, "2": ModuleState.SUSPENDED})


def test_a_rollback_swaps_them_and_puts_nothing_on_trial() -> None:
    back = roll_back(promoted(), BOTH, "m", by="orchestrator", reason="worse", now=300.0)
    assert (back.active, back.previous, back.trial, back.since) == ("1", "2", False, 300.0)
    trial = PromotionTrial(since=300.0)
    for number in range(50):
        trial.take(score("1", 0.0, number, at=400.0), back, CONFIG)
        trial.take(score("2", 1.0, number, at=400.0), back, CONFIG)
    assert verdict(trial, back, CONFIG) == "", "it does not swing to and fro"
    with pytest.raises(Conflict, match="nothing of m was promoted"):
        roll_back(None, BOTH, "m", by="ada", reason="", now=1.0)
    with pytest.raises(Conflict, match="m 1 does not run any more"):
        roll_back(promoted(), {"2": ModuleState.ACTIVE}, "m", by="ada", reason="", now=1.0)


def test_whoever_is_in_another_state_is_named() -> None:
    standings = {
        ("m", "1"): ModuleState.ACTIVE,
        ("m", "2"): ModuleState.SUSPENDED,
        ("x", "1"): ModuleState.SHADOW,
    }
    assert disagreeing({"m": promoted()}, standings) == [("m", "1", ModuleState.SHADOW)]
    standings[("m", "2")] = ModuleState.SHADOW
    assert ("m", "2", ModuleState.ACTIVE) in disagreeing({"m": promoted()}, standings)


@pytest.mark.parametrize("wrong", [{"min_scores": 1}, {"window": 5}, {"margin": 2.0}, {"z": -1.0}])
def test_settings_that_can_not_be(wrong: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="promotion"):
        PromotionConfig(**wrong)


# --- arbitration goes by it --------------------------------------------------------------------------
FACTS = JobFacts(active={0: ("j-s0-r0", "j-s0-r1")}, weights={}, revision=1, step=5)


def suggestion(version: str, first: float) -> PolicySuggestion:
    action = SetWeights(stage=0, weights={"j-s0-r0": first, "j-s0-r1": 1.0})
    return policies.suggestion(action, version=version, confidence=0.9, input_revision=5)


def test_from_the_switch_on_only_the_promoted_version_is_adopted() -> None:
    """Whatever the modules have been told by then: the switch is one moment."""
    state = ArbitrationState()
    for version, told in BOTH.items():
        state = register(state, ModuleLifecycle(module="m", version=version, state=told), 0.0)
    before, state = arbitrate(state, suggestion("1", 3.0), FACTS, 1.0)
    shadowed, state = arbitrate(state, suggestion("2", 4.0), FACTS, 10.0)
    assert (before.adopted, shadowed.adopted) == (True, False)
    state = replace(state, promoted=module_reputation.promote(state.promoted, "m", "2"))
    late, state = arbitrate(state, suggestion("1", 5.0), FACTS, 20.0)
    after, state = arbitrate(state, suggestion("2", 4.0), FACTS, 20.0)
    assert late.reason.startswith("in shadow, would have been adopted")
    assert after.adopted
    lapses, _ = lapse(state, {"j": FACTS}, 21.0)
    assert not lapses, "what holds goes on holding"
    lapses, state = lapse(withdraw(state, "m", "2", 21.0), {"j": FACTS}, 21.0)
    assert [one.reason for one in lapses] == ["the weights of m lapsed"]
    state = replace(state, promoted=module_reputation.promote(state.promoted, "m", None))
    back, _ = arbitrate(state, suggestion("1", 3.0), FACTS, 30.0)
    assert back.adopted, "as they say themselves again"
