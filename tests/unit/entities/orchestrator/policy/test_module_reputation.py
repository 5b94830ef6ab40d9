"""What modules may do to the orchestrator, and what it orders again of one that crashed (draft §4.2)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entities.orchestrator.policy.arbitration import ArbitrationConfig, arbitrate
from entities.orchestrator.policy.arbitration_state import ArbitrationState, withdraw
from entities.orchestrator.policy.module_reputation import (
    ModuleReputation,
    ReputationConfig,
    due_orders,
    ordered,
    register,
    running,
    serves,
)
from schemas.errors import BadInput, NotFound
from schemas.policy import ModuleLifecycle, ModuleOp, ModuleState
from tests.unit.entities.orchestrator.policy.test_arbitration import Mesh, weights

KEY = ("m", "1")
ACTIVE, SHADOW, REGISTERED = ModuleState.ACTIVE, ModuleState.SHADOW, ModuleState.REGISTERED


def says(state: ModuleState, incarnation: str = "i1", **more) -> ModuleLifecycle:
    return ModuleLifecycle(module="m", version="1", state=state, sid="m", incarnation=incarnation, **more)


def test_a_process_that_never_said_it_leaves_has_crashed_and_too_many_suspend_it():
    config = ReputationConfig(crash_limit=3, crash_window_s=100.0, suspension_s=50.0)
    modules = register({}, says(REGISTERED), 0.0, config)
    modules = register(modules, says(ACTIVE), 1.0, config)
    modules = register(modules, says(REGISTERED, "i2"), 2.0, config)
    modules = register(modules, says(ACTIVE, "i2"), 3.0, config)
    assert (modules[KEY].crashes, modules[KEY].strikes, modules[KEY].suspended_for) == (1, 1, "")
    modules = register(modules, says(REGISTERED, "i3"), 200.0, config)  # long after: the window is over
    modules = register(modules, says(REGISTERED, "i4"), 201.0, config)
    assert modules[KEY].suspended_for == ""
    modules = register(modules, says(REGISTERED, "i5"), 202.0, config)
    assert modules[KEY].suspended_for == "3 crashes within 100 s"
    assert modules[KEY].suspended_until == 252.0


def test_one_that_retired_and_came_again_has_not_crashed():
    modules = register({}, says(ACTIVE), 0.0)
    modules = register(modules, says(ModuleState.DRAINING), 1.0)
    modules = register(modules, says(REGISTERED, "i2"), 2.0)
    assert modules[KEY].crashes == 0
    assert KEY not in register(modules, says(ModuleState.RETIRED, "i2"), 3.0)


def test_what_was_ordered_is_ordered_again_of_one_that_came_back_otherwise():
    standing = ModuleReputation(state=SHADOW, sid="m")
    assert due_orders(standing) == []
    standing = ordered(standing, ModuleOp.ACTIVATE, ())
    standing = ordered(standing, ModuleOp.DISABLE, ("j", "k"))
    standing = ordered(standing, ModuleOp.ENABLE, ("j", "x"))
    assert due_orders(standing) == [(ModuleOp.ACTIVATE, ()), (ModuleOp.DISABLE, ("k",))]
    started_for_one = replace(standing, jobs=("a",))
    assert (ModuleOp.ENABLE, ("j", "x")) in due_orders(started_for_one)
    as_wanted = replace(standing, state=ACTIVE, without=("k",))
    assert due_orders(as_wanted) == []
    assert due_orders(replace(standing, state=ModuleState.SUSPENDED)) == []  # its own doing


def test_for_which_jobs_a_module_serves():
    assert serves(ModuleReputation(), "j")
    assert not serves(ModuleReputation(jobs=("k",)), "j")
    assert not serves(ModuleReputation(without=("j",)), "j")


def test_an_order_needs_one_running_module():
    modules = register({}, says(ACTIVE), 0.0)
    assert running(modules, "m", None)[0] == KEY
    assert running(modules, "m", "1")[1].sid == "m"
    with pytest.raises(NotFound, match=r"no module m 2 runs: `dmsc policy list`"):
        running(modules, "m", "2")
    second = says(SHADOW).model_copy(update={"version": "2", "sid": "m-shadow-2"})
    with pytest.raises(BadInput, match="m runs in versions 1, 2: say which"):
        running(register(modules, second, 1.0), "m", None)


def test_one_that_does_not_keep_up_is_suspended():
    mesh = Mesh(config=ArbitrationConfig(standing=ReputationConfig(lag_limit=3), max_lag_steps=5))
    late = [mesh.ask(weights(a=2.0, b=1.0, revision=1), now=10.0 * number) for number in range(3)]
    assert [outcome.suspended for outcome in late] == [False, False, True]
    assert "3 suggestions in a row from too long ago: it does not keep up" in late[-1].reason
    standing = mesh.state.modules[KEY]
    assert (standing.suggestions, standing.adopted, standing.strikes) == (3, 0, 3)


def test_a_suggestion_whose_scope_is_not_its_actions_is_nonsense():
    mesh = Mesh()
    outcome = mesh.ask(weights(a=2.0, b=1.0).model_copy(update={"scope": "stage 1"}))
    assert outcome.reason == "its scope is stage 1, its action concerns stage 0"
    assert mesh.state.modules[KEY].nonsense == 1
    assert mesh.ask(weights(a=2.0, b=1.0).model_copy(update={"scope": "stage 0"})).adopted


def test_what_a_module_had_adopted_can_be_taken_back_for_a_job_or_for_all():
    mesh = Mesh()
    assert mesh.ask(weights(a=3.0, b=1.0)).adopted
    mesh.state = withdraw(mesh.state, "m", "2", 1.0)
    mesh.state = withdraw(mesh.state, "m", "1", 1.0, {"another"})
    assert mesh.tick(1.0) == []
    mesh.state = withdraw(mesh.state, "m", "1", 1.0, {"j"})
    [lapsed] = mesh.tick(1.0)
    assert (lapsed.stage, lapsed.weights) == (0, {"a": 1.0, "b": 1.0})


def test_who_speaks_under_a_modules_name_without_being_it_is_a_stranger():
    mesh = Mesh()
    mesh.state = ArbitrationState(modules=register({}, says(ACTIVE), 0.0))
    outcome, _ = arbitrate(mesh.state, weights(a=3.0, b=1.0), mesh.facts, 0.0, sid="intruder")
    assert "has not registered" in outcome.reason
    outcome, _ = arbitrate(mesh.state, weights(a=3.0, b=1.0), mesh.facts, 0.0, sid="m")
    assert outcome.adopted
