"""One writer per knob, objectives, budgets and automation (ADR-0092)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from entities.orchestrator.policy.arbitration import ArbitrationConfig, Outcome, arbitrate, lapse, register
from entities.orchestrator.policy.arbitration_state import (
    ArbitrationState,
    end_automation,
    expired_jobs,
    free,
    hold,
    knobs,
    not_carried_out,
)
from entities.orchestrator.policy.knobs import in_words, set_by_operator
from entities.orchestrator.policy.suggestion_rules import JobFacts
from entities.orchestrator.transaction.reduction_layout import ReductionLayout
from schemas.actions import (
    Action,
    AvoidInstance,
    CheckpointNow,
    Migrate,
    Scale,
    SetAlgorithm,
    SetQueueOrder,
    SetRate,
    SetReduction,
    SetWeights,
    SetWindow,
)
from schemas.automation import OWN_LOOP, Automation
from schemas.changes import Forecast, JobObjective, StepUse
from schemas.policy import ModuleLifecycle, ModuleState
from tests.builders.policies import suggestion

FACTS = JobFacts(
    active={0: ("a", "b"), 1: ("c",)},
    weights={},
    revision=7,
    step=10,
    windows={0: 4, 1: 4},
    admitted_per_s=30.0,
    microbatches=8,
    senders=2,
    algorithm="expected-completion",
    replicas=2,
    replica_range=(1, 4),
    waiting=("k", "l"),
)
FASTER = Forecast.of(0.4, 0.3, cost_s=1.0, steps_left=100)


def dearer(before: float, after: float, objective: JobObjective = JobObjective.TIME) -> Forecast:
    """A step is faster, and uses so much money."""
    uses = {JobObjective.COST: StepUse(before=before, after=after)}
    return Forecast.of(0.4, 0.3, cost_s=1.0, steps_left=100, objective=objective, uses=uses)


class Desk:
    """Arbitration with modules m and n."""

    def __init__(self, **facts: Any) -> None:
        self.facts = replace(FACTS, **facts)
        self.state = ArbitrationState()
        for module in ("m", "n"):
            active = ModuleLifecycle(module=module, version="1", state=ModuleState.ACTIVE)
            self.state = register(self.state, active, 0.0)

    def ask(self, action: Action, now: float = 0.0, *, own: bool = False, **more: Any) -> Outcome:
        said = suggestion(action, **{"input_revision": 10} | ({"module": OWN_LOOP} if own else {}) | more)
        outcome, self.state = arbitrate(
            self.state, said, self.facts, now, config=ArbitrationConfig(), own=own
        )
        return outcome


THREE_TO_ONE = SetWeights(stage=0, weights={"a": 3.0, "b": 1.0})
WINDOW = SetWindow(stage=0, in_flight=6, forecast=FASTER)


def test_who_holds_a_knob_keeps_it_until_it_lapses_or_is_outranked() -> None:
    desk = Desk()
    assert desk.ask(WINDOW, module="m", confidence=0.7).adopted
    weaker = desk.ask(WINDOW, 10.0, module="n", confidence=0.7)
    assert weaker.reason == (
        "window of stage 0: held for another 50.0 s: m prevails with confidence 0.70 against 0.70"
    )
    assert "m prevails" in desk.ask(WINDOW, 10.0, own=True, confidence=1.0).reason
    assert desk.ask(WINDOW, 10.0, module="n", confidence=0.8).adopted
    assert knobs(desk.state, "j")["window of stage 0"].module == "n"
    [freed], desk.state = lapse(desk.state, {"j": desk.facts}, 70.0)
    assert (freed.knob, freed.stage) == ("window of stage 0", None)
    assert desk.ask(WINDOW, 70.0, own=True).adopted


def test_only_jobs_of_which_something_has_lapsed_are_looked_at() -> None:
    desk = Desk()
    assert desk.ask(WINDOW).adopted
    assert desk.ask(THREE_TO_ONE, 10.0, job="k").adopted
    assert desk.ask(AvoidInstance(sid="a"), 20.0, job="l").adopted
    assert desk.ask(SetQueueOrder(jobs=("k",)), 30.0, job="j").adopted
    desk.state = hold(desk.state, "r", "replicas", set_by_operator("3", "rita", 0.0))
    expired = [expired_jobs(desk.state, now) for now in (59.9, 60.0, 70.0, 80.0, 90.0)]
    assert expired == [set(), {"j"}, {"j", "k"}, {"j", "k", "l"}, {"", "j", "k", "l"}]


def test_the_own_loop_gives_way_to_any_module() -> None:
    desk = Desk()
    assert desk.ask(WINDOW, own=True, confidence=1.0).adopted
    assert desk.ask(WINDOW, 1.0, module="m", confidence=0.5).adopted


def test_a_person_outranks_all_until_released() -> None:
    desk = Desk()
    desk.state = hold(desk.state, "j", "replicas", set_by_operator("3", "rita", 0.0))
    scale = Scale(replicas=4, forecast=FASTER)
    assert desk.ask(scale, 1e6).reason == "replicas: set by rita, until a person releases it"
    shown = in_words("replicas", knobs(desk.state, "j")["replicas"], 5.0)
    assert (shown.holder, shown.value, shown.left_s) == ("operator", "3", None)
    desk.state = end_automation(desk.state, "j", 1e6)
    assert "replicas" in knobs(desk.state, "j")
    desk.state = hold(desk.state, "j", "replicas", None)
    assert desk.ask(scale, 1e6).adopted


def test_what_the_job_declines_holds_no_knob() -> None:
    desk = Desk()
    before = desk.state
    assert desk.ask(WINDOW).adopted
    desk.state = not_carried_out(desk.state, suggestion(WINDOW), before)
    assert knobs(desk.state, "j") == {}
    assert desk.state.modules["m", "1"].adopted == 0


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (SetWindow(stage=0, in_flight=4, forecast=FASTER), "window of stage 0 is 4 in flight already"),
        (SetAlgorithm(algorithm="expected-completion", forecast=FASTER), "algorithm is expected-completion"),
        (Scale(replicas=2, forecast=FASTER), "replicas is 2 already"),
        (SetRate(per_s=30.0, forecast=FASTER), "admission rate is 30 microbatches a second already"),
        (SetReduction(stage=0, parts={"a": 2.0}, forecast=FASTER), "of stage 0 is a 2 already"),
    ],
)
def test_what_is_so_already_changes_nothing(action: Action, said: str) -> None:
    desk = Desk(layouts={0: ReductionLayout(parts={"a": 2.0})})
    assert said in desk.ask(action).reason


def test_a_reduction_that_is_suggested_again_holds_longer() -> None:
    reduction = SetReduction(stage=0, order=("b", "a"), forecast=FASTER)
    desk = Desk()
    assert desk.ask(reduction, valid_s=60.0).adopted
    desk.facts = replace(desk.facts, layouts={0: ReductionLayout(order=("b", "a"))})
    again = desk.ask(reduction, 50.0, valid_s=60.0)
    assert again.reason == (
        "would change nothing: reduction of stage 0 is equal parts in the order b, a already; "
        "what holds is renewed"
    )
    assert lapse(desk.state, {"j": desk.facts}, 100.0)[0] == []
    [ended], desk.state = lapse(desk.state, {"j": desk.facts}, 110.0)
    assert ended.knob == "reduction of stage 0"


@pytest.mark.parametrize("mode", [Automation.OFF, Automation.ADVISE])
def test_where_nothing_is_adopted_nothing_is_held_against_a_module(mode: Automation) -> None:
    nonsense, late = SetWeights(stage=7, weights={"a": 1.0}), {"input_revision": -90}
    desk = Desk(automation=mode)
    for second in range(30):
        assert not desk.ask(nonsense, 2.0 * second).suspended
        assert not desk.ask(THREE_TO_ONE, 2.0 * second + 1, **late).suspended
    assert (desk.state.modules["m", "1"].strikes, desk.state.modules["m", "1"].suggestions) == (0, 60)
    desk.facts = replace(desk.facts, automation=Automation.ACT)
    for second in range(100, 109):
        assert not desk.ask(nonsense, second).suspended
    desk.facts = replace(desk.facts, automation=mode)
    assert not desk.ask(THREE_TO_ONE, 110.0).suspended, "it clears no strikes, either"
    desk.facts = replace(desk.facts, automation=Automation.ACT)
    assert desk.ask(nonsense, 120.0).suspended


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (SetWindow(stage=7, in_flight=4, forecast=FASTER), "unknown stage 7"),
        (SetAlgorithm(algorithm="coin", forecast=FASTER), "algorithm coin: give one of expected-completion"),
        (Scale(replicas=9, forecast=FASTER), "9 replicas are outside of the job's range, 1 to 4"),
        (Migrate(sid="z", forecast=FASTER), "unknown instance z"),
        (SetReduction(stage=7, order=("a",), forecast=FASTER), "unknown stage 7"),
        (SetReduction(stage=1, order=("c",), forecast=FASTER), "stage 1 has one replica: nothing is reduced"),
        (SetReduction(stage=0, forecast=FASTER), "it says neither parts nor order of the reduction"),
        (SetReduction(stage=0, parts={"z": 2.0}, forecast=FASTER), "unknown instance z in stage 0"),
        (
            SetReduction(stage=0, order=("a", "a"), forecast=FASTER),
            "the order of the reduction of stage 0 names",
        ),
        (SetReduction(stage=0, parts={"a": -1.0}, forecast=FASTER), "part -1.0 of a is not a finite number"),
        (SetReduction(stage=0, parts={"a": 0, "b": 0}, forecast=FASTER), "nobody would add up anything"),
        (
            SetRate(per_s=4.0, forecast=FASTER),
            "a step of 8 microbatches takes at least 2.000 s at 4 a second, and not 0.300 s",
        ),
        (SetRate(per_s=0.15, forecast=FASTER), "0.15 a second: for 2 senders give 0.2 at least"),
        (SetQueueOrder(jobs=("k", "x")), "job x does not wait for slots"),
        (SetQueueOrder(jobs=("k", "k")), "the order names a job twice"),
        (
            Scale(replicas=4, forecast=Forecast.of(0.4, 0.5, cost_s=0, steps_left=9)),
            "its own objective time forbids it: by its forecast a step takes 0.500 s instead of 0.400 s",
        ),
        (
            Scale(replicas=1, forecast=dearer(2.0, 3.0, JobObjective.COST)),
            "its own objective cost forbids it: by its forecast a step uses 3 of money instead of 2",
        ),
        (
            Scale(
                replicas=1,
                forecast=Forecast.of(0.4, 0.3, cost_s=0, steps_left=9, objective=JobObjective.ENERGY),
            ),
            "its objective is energy, but its forecast lacks uses.energy: what a step uses of it",
        ),
    ],
)
def test_bad_suggestions_are_one_line(action: Action, said: str) -> None:
    outcome = Desk().ask(action)
    assert not outcome.adopted
    assert outcome.reason.startswith(said)
    assert "\n" not in outcome.reason


def test_a_job_without_a_range_is_not_scaled() -> None:
    outcome = Desk(replica_range=(2, 2)).ask(Scale(replicas=3, forecast=FASTER))
    assert outcome.reason.startswith("the job has no range of replicas")


@pytest.mark.parametrize("action", [WINDOW, THREE_TO_ONE, CheckpointNow()])
def test_automation_off_and_advise(action: Action) -> None:
    off = Desk(automation=Automation.OFF).ask(action)
    assert off.reason.startswith("automation of job j is off: nothing is adopted")
    advised = Desk(automation=Automation.ADVISE).ask(action)
    assert not advised.adopted
    assert advised.reason.startswith("advice, would have been ")
    assert Desk().ask(action).adopted


def test_the_jobs_objective_and_budget() -> None:
    more = Scale(replicas=4, forecast=dearer(1.0, 1.5))
    assert Desk().ask(more).adopted
    assert Desk(objective=JobObjective.COST).ask(more).reason == (
        "the job's objective is cost: a step would use 1.5 of money instead of 1"
    )
    silent = Desk(objective=JobObjective.ENERGY).ask(more)
    assert silent.reason == "the job's objective is energy, and the forecast says nothing of it"
    budget, used = {JobObjective.COST: 200.0}, {JobObjective.COST: 60.0}
    over = Desk(budget=budget, used=used).ask(more)
    assert over.reason == "the job would use 210 of money in all; its budget of cost is 200"
    assert Desk(budget={JobObjective.COST: 220.0}, used=used).ask(more).adopted
    cheaper = Scale(replicas=1, forecast=dearer(1.5, 1.0, JobObjective.COST))
    assert Desk(budget=budget, used={JobObjective.COST: 190.0}).ask(cheaper).adopted


def test_a_module_of_the_loops_name_is_a_stranger() -> None:
    assert "has not registered" in Desk().ask(WINDOW, module=OWN_LOOP).reason


def test_what_is_taken_back_frees_the_knob_of_whom_it_was_and_nobody_elses() -> None:
    desk = Desk()
    desk.ask(WINDOW)
    desk.ask(THREE_TO_ONE)
    of_others = free(
        free(desk.state, "j", "window of stage 0", "n", 5.0), "j", "weights of stage 0", "n", 5.0
    )
    assert of_others == desk.state
    assert expired_jobs(free(desk.state, "j", "weights of stage 0", "m", 5.0), 5.0) == {"j"}
    assert "window of stage 0" not in knobs(free(desk.state, "j", "window of stage 0", "m", 5.0), "j")
    pinned = hold(desk.state, "j", "window of stage 0", set_by_operator("4", "rita", 4.0))
    assert knobs(free(pinned, "j", "window of stage 0", "m", 5.0), "j").keys() == {
        "weights of stage 0",
        "window of stage 0",
    }
