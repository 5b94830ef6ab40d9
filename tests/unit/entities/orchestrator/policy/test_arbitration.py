"""Arbitration (draft §4.2, §4.4(4)): what is adopted, what is declined, always with a reason."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from entities.orchestrator.policy.arbitration import ArbitrationConfig, arbitrate, lapse, register
from entities.orchestrator.policy.arbitration_state import ArbitrationState, backups, forget_job
from entities.orchestrator.policy.module_reputation import ReputationConfig
from entities.orchestrator.policy.suggestion_rules import JobFacts
from schemas.actions import UseBackup
from schemas.policy import (
    AvoidInstance,
    ExpectFailures,
    ModuleLifecycle,
    ModuleState,
    MoveInstance,
    NoAction,
    PolicySuggestion,
    SetWeights,
)
from tests.builders.policies import forecast, suggestion

FACTS = JobFacts(active={0: ("a", "b"), 1: ("c", "d", "e")}, weights={}, revision=7, step=10)


def lifecycle(module="m", state=ModuleState.ACTIVE, version="1", jobs=()) -> ModuleLifecycle:
    return ModuleLifecycle(module=module, version=version, state=state, jobs=jobs)


def weights(
    stage=0, module="m", version="1", confidence=0.8, valid_s=60.0, revision=10, **by_sid
) -> PolicySuggestion:
    said = {"module": module, "version": version, "confidence": confidence, "valid_s": valid_s}
    return suggestion(SetWeights(stage=stage, weights=by_sid), **said, input_revision=revision)


def avoid(sid: str, **more) -> PolicySuggestion:
    return suggestion(AvoidInstance(sid=sid), **more)


def move(sid: str, stage: int, confidence=0.8) -> PolicySuggestion:
    return suggestion(MoveInstance(sid=sid, stage=stage, forecast=forecast()), confidence=confidence)


class Mesh:
    """The orchestrator's side: keeps the state and applies what was adopted to the facts."""

    def __init__(self, *modules: str, config: ArbitrationConfig | None = None) -> None:
        self.config = config or ArbitrationConfig()
        self.facts: JobFacts | None = FACTS
        self.state = ArbitrationState()
        for module in modules or ("m",):
            self.state = register(self.state, lifecycle(module), 0.0)

    def ask(self, suggested: PolicySuggestion, now: float = 0.0, received_at: float | None = None):
        outcome, self.state = arbitrate(
            self.state, suggested, self.facts, now, received_at=received_at, config=self.config
        )
        assert outcome.reason
        if outcome.adopted:
            self._apply(outcome.stage, outcome.weights)
        return outcome

    def tick(self, now: float):
        lapses, self.state = lapse(self.state, {"j": self.facts}, now)
        for one in lapses:
            self._apply(one.stage, one.weights)
        return lapses

    def _apply(self, stage, table) -> None:
        held = {**self.facts.weights, stage: table}
        self.facts = JobFacts(
            active=self.facts.active, weights=held, revision=self.facts.revision + 1, step=10
        )


def test_a_sensible_suggestion_is_adopted_with_the_whole_table_at_mean_one():
    outcome = Mesh().ask(weights(a=3.0, b=1.0))
    assert outcome.adopted
    assert (outcome.stage, outcome.weights, outcome.revision) == (0, {"a": 1.5, "b": 0.5}, 8)
    assert outcome.reason == "adopted: 25% of the work of stage 0 goes elsewhere; why"


def test_an_instance_that_the_module_did_not_know_counts_as_an_average_one():
    assert Mesh().ask(weights(stage=1, c=30.0, d=10.0)).weights == {"c": 1.5, "d": 0.5, "e": 1.0}


@pytest.mark.parametrize(
    ("suggested", "reason"),
    [
        (weights(a=math.nan, b=1.0), "weight nan of a is not a finite number ≥ 0"),
        (weights(a=-1.0, b=1.0), "weight -1.0 of a is not a finite number ≥ 0"),
        (weights(a=math.inf, b=1.0), "weight inf of a is not a finite number ≥ 0"),
        (weights(a=1e308, b=1e308), "the weights of stage 0 sum to inf"),
        (weights(a=0.0, b=0.0), "the weights of stage 0 sum to 0"),
        (weights(), "the weights of stage 0 sum to 0"),
        (weights(a=1.0, z=2.0), "unknown instance z in stage 0"),
        (weights(stage=5, a=1.0), "unknown stage 5"),
        (avoid("z"), "unknown instance z"),
        (weights(valid_s=math.inf, a=2.0, b=1.0), "valid for inf s"),
        (weights(confidence=0.3, a=2.0, b=1.0), "confidence 0.30 is below 0.50"),
        (
            weights(a=1.01, b=1.0),
            "would change nothing: at most 1% of the work of stage 0 would go elsewhere",
        ),
        (weights(revision=-11, a=2.0, b=1.0), "derived from step -11, the job is at 10"),
        (weights(version="2", a=2.0, b=1.0), "m 2 has not registered (no lifecycle message seen)"),
        (weights(module="x", a=2.0, b=1.0), "x 1 has not registered (no lifecycle message seen)"),
        (suggestion(NoAction(note="hm")), "an observation, nothing to adopt"),
    ],
)
def test_what_is_declined_and_why(suggested, reason):
    mesh = Mesh()
    outcome = mesh.ask(suggested)
    assert not outcome.adopted
    assert outcome.reason == reason
    assert outcome.weights is None
    assert mesh.facts is FACTS


def test_an_expired_suggestion_is_declined():
    outcome = Mesh().ask(weights(valid_s=2.0, a=2.0, b=1.0), now=13.0, received_at=10.0)
    assert outcome.reason == "expired: valid for 2.0 s, considered after 3.0 s"


def test_a_job_that_is_not_running_is_no_strike():
    mesh = Mesh()
    mesh.facts = None
    for at in range(30):
        assert mesh.ask(weights(a=2.0, b=1.0), float(at)).reason == "job j is not running"


@pytest.mark.parametrize("state", [ModuleState.REGISTERED, ModuleState.SUSPENDED, ModuleState.DRAINING])
def test_only_active_modules_are_adopted(state):
    mesh = Mesh()
    mesh.state = register(mesh.state, lifecycle(state=state), 0.0)
    assert mesh.ask(weights(a=2.0, b=1.0)).reason == f"m 1 is {state.value}, not active"


def test_a_retired_module_is_forgotten():
    mesh = Mesh()
    mesh.state = register(mesh.state, lifecycle(state=ModuleState.RETIRED), 0.0)
    assert "has not registered" in mesh.ask(weights(a=2.0, b=1.0)).reason


def test_a_module_for_other_jobs_is_declined():
    mesh = Mesh()
    mesh.state = register(mesh.state, lifecycle(jobs=("k",)), 0.0)
    assert mesh.ask(weights(a=2.0, b=1.0)).reason == "m 1 is not enabled for job j"


def test_shadow_beside_active_hears_what_it_would_have_got_and_changes_nothing():
    mesh = Mesh()
    mesh.state = register(mesh.state, lifecycle(version="2", state=ModuleState.SHADOW), 0.0)
    outcome = mesh.ask(weights(version="2", a=2.0, b=1.0))
    assert not outcome.adopted
    assert outcome.reason.startswith("in shadow, would have been adopted: 17% of the work")
    assert mesh.state.adopted == {}
    assert mesh.ask(weights(a=2.0, b=1.0)).adopted  # no cool-down came from the shadow


def test_within_the_cool_down_the_better_founded_module_wins():
    mesh = Mesh("m", "n")
    assert mesh.ask(weights(a=2.0, b=1.0, confidence=0.7), 100.0).adopted
    again = mesh.ask(weights(a=3.0, b=1.0, confidence=0.99), 101.0)
    assert again.reason == "cool-down of stage 0 for another 4.0 s"  # nobody outbids itself
    weaker = mesh.ask(weights(module="n", a=1.0, b=3.0, confidence=0.7), 102.0)
    assert (
        weaker.reason
        == "weights of stage 0: held for another 58.0 s: m prevails with confidence 0.70 against 0.70"
    )
    assert mesh.ask(weights(module="n", a=1.0, b=3.0, confidence=0.9), 102.0).adopted
    assert mesh.ask(weights(stage=1, c=5.0, d=1.0), 102.0).adopted  # another stage has its own
    late = mesh.ask(weights(a=2.0, b=1.0, confidence=0.6), 107.0)
    assert late.reason.startswith("weights of stage 0: held for another 55.0 s: n prevails")
    mesh.tick(162.0)
    assert mesh.ask(weights(a=2.0, b=1.0, confidence=0.6), 162.0).adopted  # what n set has lapsed


def test_precedence_wins_before_confidence():
    mesh = Mesh("m", "n", config=ArbitrationConfig(precedence={"n": 1}))
    assert mesh.ask(weights(a=2.0, b=1.0, confidence=0.9), 100.0).adopted
    assert mesh.ask(weights(module="n", a=1.0, b=2.0, confidence=0.6), 101.0).adopted
    assert not mesh.ask(weights(a=2.0, b=1.0, confidence=1.0), 102.0).adopted


def test_an_avoided_instance_gets_nothing_until_that_lapses():
    mesh = Mesh("m", "n")
    assert mesh.ask(avoid("c", valid_s=30.0), 0.0).weights == {"c": 0.0, "d": 1.0, "e": 1.0}
    outcome = mesh.ask(weights(stage=1, module="n", c=2.0, d=3.0, e=1.0), 10.0)
    assert outcome.weights == {"c": 0.0, "d": 1.5, "e": 0.5}
    assert mesh.tick(29.0) == []
    [lapsed] = mesh.tick(30.0)
    assert lapsed.weights == {"c": 1.0, "d": 1.5, "e": 0.5}
    assert lapsed.reason == "m no longer avoids c"


def test_a_backup_gets_the_share_of_the_instance_that_it_stands_for_until_that_lapses():
    mesh = Mesh()
    mesh.facts = JobFacts(
        active=FACTS.active, weights={1: {"c": 2.0, "d": 1.0, "e": 0.0}}, revision=7, step=10
    )
    outcome = mesh.ask(suggestion(UseBackup(sid="c", backup="e"), valid_s=30.0))
    assert outcome.adopted
    assert outcome.weights == {"c": 0.0, "d": 1.0, "e": 2.0}, "d keeps its share"
    assert mesh.ask(avoid("e"), now=6.0).weights == {"c": 0.0, "d": 1.0, "e": 0.0}, "nobody stands for it"
    assert backups(mesh.state, "j") == {"e"}
    (back,) = mesh.tick(now=31.0)
    assert back.weights == {"c": 2.0, "d": 1.0, "e": 0.0}
    assert backups(mesh.state, "j") == frozenset()


def test_the_last_instance_that_works_can_not_be_avoided():
    mesh = Mesh()
    assert mesh.ask(avoid("a"), 0.0).adopted
    assert mesh.ask(avoid("b"), 10.0).reason == "without b nobody would be left to do stage 0"


def test_lapsed_weights_go_back_to_what_the_orchestrator_had_set_itself():
    mesh = Mesh("m", "n")
    standby = {1: {"c": 1.0, "d": 1.0, "e": 0.0}}
    mesh.facts = JobFacts(active=FACTS.active, weights=standby, revision=1, step=10)
    assert mesh.ask(weights(stage=1, c=3.0, d=1.0), 0.0).weights == {"c": 1.5, "d": 0.5, "e": 0.0}
    assert mesh.ask(weights(stage=1, module="n", c=1.0, d=3.0, confidence=0.9, valid_s=20.0), 10.0).adopted
    [lapsed] = mesh.tick(30.0)
    assert lapsed.weights == standby[1]
    assert mesh.tick(31.0) == []
    assert mesh.state.base == {}


def test_saying_the_same_again_renews_what_holds():
    mesh = Mesh()
    assert mesh.ask(weights(a=3.0, b=1.0, valid_s=60.0), 0.0).adopted
    renewal = mesh.ask(weights(a=3.0, b=1.0, valid_s=60.0), 30.0)
    assert not renewal.adopted
    assert renewal.reason.endswith("what holds is renewed")
    assert mesh.tick(61.0) == []
    assert len(mesh.tick(90.0)) == 1


def test_an_ended_job_leaves_nothing_behind():
    mesh = Mesh()
    mesh.ask(weights(a=3.0, b=1.0), 0.0)
    mesh.ask(avoid("c"), 0.0)
    state = forget_job(mesh.state, "j")
    assert (state.base, state.adopted, state.avoided) == ({}, {}, {})


def test_a_flood_is_answered_once_and_then_suspended():
    config = ArbitrationConfig(
        standing=ReputationConfig(rate_per_s=1.0, burst=5, flood_limit=50, suspension_s=60.0)
    )
    mesh = Mesh(config=config)
    outcomes = [mesh.ask(weights(a=1.0, b=1.0), 0.0) for _ in range(200)]
    assert sum(outcome.answer for outcome in outcomes) == 5 + 1 + 1  # its burst, the warning, the suspension
    assert sum(outcome.suspended for outcome in outcomes) == 1
    assert "50 suggestions over 1/s without a pause" in outcomes[54].reason
    assert "suspended for another 30 s" in mesh.ask(weights(a=2.0, b=1.0), 30.0).reason
    assert mesh.ask(weights(a=2.0, b=1.0), 61.0).adopted  # afterwards it is listened to afresh


def test_strangers_can_not_flood_either():
    mesh = Mesh()
    outcomes = [mesh.ask(weights(module=f"x{index}", a=2.0, b=1.0), 0.0) for index in range(500)]
    assert sum(outcome.answer for outcome in outcomes) < 30
    assert len(mesh.state.modules) == 2
    assert mesh.ask(weights(a=2.0, b=1.0), 0.0).adopted


def test_repeated_nonsense_suspends_and_one_sensible_suggestion_clears_the_strikes():
    config = ArbitrationConfig(standing=ReputationConfig(nonsense_limit=3))
    mesh = Mesh(config=config)
    bad, good = weights(a=math.nan), weights(a=1.0, b=1.0)
    for at, suggested in enumerate((bad, bad, good, bad, bad)):
        assert not mesh.ask(suggested, float(at)).suspended
    outcome = mesh.ask(bad, 9.0)
    assert outcome.suspended
    assert outcome.reason.startswith(
        "suspended for 300 s: 3 nonsensical suggestions in a row, the last: weight nan"
    )
    restarted = register(mesh.state, lifecycle(), 10.0)  # a restart does not launder it
    assert "suspended for another" in arbitrate(restarted, weights(a=2.0, b=1.0), FACTS, 10.0)[0].reason


def test_the_given_state_is_never_changed():
    state = register(ArbitrationState(), lifecycle(), 0.0)
    before = repr(state)
    arbitrate(state, weights(a=2.0, b=1.0), FACTS, 0.0)
    arbitrate(state, avoid("a"), FACTS, 0.0)
    assert repr(state) == before


def test_a_move_is_passed_on_to_the_jobs_run_and_changes_no_table():
    mesh = Mesh()
    wish = move("e", 0)
    outcome, state = arbitrate(mesh.state, wish, FACTS, 0.0)
    assert outcome.adopted
    assert outcome.passed_on == wish.action
    assert outcome.weights is None
    assert (state.base, state.adopted, state.avoided) == ({}, {}, {})


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (move("e", 7), "unknown stage 7"),
        (move("z", 0), "unknown instance z"),
        (move("e", 1), "e is in stage 1 already"),
        (move("e", 0, confidence=0.2), "confidence 0.20 is below 0.50"),
    ],
)
def test_a_move_that_can_not_be_meant_is_declined(wish, reason):
    outcome = Mesh().ask(wish)
    assert not outcome.adopted
    assert outcome.reason == reason


def test_nobody_is_the_last_of_a_stage_to_move():
    mesh = Mesh()
    mesh.facts = JobFacts(active={0: ("a",), 1: ("c", "d")}, weights={}, revision=7, step=10)
    assert mesh.ask(move("a", 1)).reason == "without a nobody would be left to do stage 0"


def test_a_shadow_module_moves_nobody():
    mesh = Mesh()
    mesh.state = register(mesh.state, lifecycle("m", ModuleState.SHADOW), 0.0)
    outcome = mesh.ask(move("e", 0))
    assert not outcome.adopted
    assert outcome.reason.startswith("in shadow, would have been passed on")


def test_expected_failures_are_passed_on_and_nonsense_is_not() -> None:
    state = Mesh().state
    outcome, _ = arbitrate(state, suggestion(ExpectFailures(between_s=600.0), valid_s=30.0), FACTS, 10.0)
    assert outcome.adopted
    assert outcome.passed_on == ExpectFailures(between_s=600.0)
    assert outcome.valid_s == 30.0
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        outcome, _ = arbitrate(state, suggestion(ExpectFailures(between_s=bad)), FACTS, 10.0)
        assert not outcome.adopted
        assert "a failure every" in outcome.reason
    outcome, _ = arbitrate(state, suggestion(ExpectFailures(between_s=9.0), confidence=0.1), FACTS, 10.0)
    assert "below" in outcome.reason


@pytest.mark.parametrize(
    "action",
    [
        SetWeights(stage=0, weights={"a": 1.0, "b": 3.0}),
        AvoidInstance(sid="a"),
        MoveInstance(sid="c", stage=0, forecast=forecast()),
        ExpectFailures(between_s=600.0),
    ],
    ids=lambda action: action.action,
)
def test_a_users_module_has_a_say_in_that_users_jobs_alone(action) -> None:
    mesh = Mesh()
    mesh.state = register(mesh.state, lifecycle().model_copy(update={"owner": "ann"}), 0.0)
    anns = suggestion(action).model_copy(update={"owner": "ann"})
    mesh.facts = replace(FACTS, user="bob")
    declined = mesh.ask(anns)
    assert not declined.adopted
    assert declined.reason == "m 1 is ann's, and has a say in ann's jobs alone"
    mesh.facts = replace(FACTS, user="ann")
    assert mesh.ask(anns).adopted


def test_a_module_of_the_same_name_speaks_for_its_own_owner() -> None:
    """Users `ann` and `ann-b` may both run a module `ann-b`; a mesh's module may bear a user's name, too."""
    mesh = Mesh()
    mesh.facts = replace(FACTS, user="bob")
    bobs = weights(a=1.0, b=3.0).model_copy(update={"owner": "bob"})
    assert "has not registered" in mesh.ask(bobs).reason
    assert mesh.ask(weights(a=1.0, b=3.0)).adopted
