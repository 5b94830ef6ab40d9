"""Each action of modules, with each of its fields wrong: one line, a strike, and nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest

from bus import subjects
from bus.wire import codec
from entities.orchestrator.policy.arbitration import arbitrate, register
from entities.orchestrator.policy.arbitration_state import ArbitrationState
from entities.orchestrator.policy.module_reputation import unreadable
from entities.orchestrator.policy.suggestion_rules import JobFacts
from schemas.actions import Action
from schemas.errors import BadMessage
from schemas.names import MESH
from schemas.policy import ModuleLifecycle, ModuleState, PolicySuggestion
from tests.bad_messages import envelope
from tests.builders.policies import forecast
from tests.builders.services import served_by

FACTS = JobFacts(
    active={0: ("a", "b"), 1: ("c", "d")},
    weights={},
    windows={0: 2, 1: 2},
    revision=7,
    step=10,
    microbatches=4,
    replicas=2,
    replica_range=(1, 3),
    waiting=("w",),
    service=served_by(weights={"v1": 9_500, "v2": 500}, stable="v1"),
    serves="v2",
)
GOOD = forecast().model_dump(mode="json")
WORSE = forecast(step_after_s=1.2).model_dump(mode="json")
SUGGESTED = {
    "module": "m",
    "version": "1",
    "job": "j",
    "confidence": 0.8,
    "reason": "why",
    "input_revision": 10,
    "valid_s": 60.0,
}
FORECASTS = [
    *("soon", None, {}, {**GOOD, "step_before_s": 0.0}, {**GOOD, "step_after_s": math.nan}),
    *({**GOOD, "cost_s": -1.0}, {**GOOD, "gain_s": math.inf}, {**GOOD, "steps_left": -1}),
    *({**GOOD, "objective": "fame"}, {**GOOD, "objective": "cost"}, WORSE),
    *({**GOOD, "uses": {"cost": {"before": -1.0, "after": 1.0}}}, {**GOOD, "uses": {"fame": {}}}),
]
MAYBE = [each for each in FORECASTS if each is not None]
"""Of actions that need none."""
STAGES = [5, -1, 0.5, "x", None]
SIDS = ["z", "", "no token", "x" * 200, 5, None]
NUMBERS = [0, -1, math.nan, math.inf, "x", None]
SIZES = [-1.0, math.nan, math.inf, "x"]

VOCABULARY: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "set_weights": (
        {"stage": 0, "weights": {"a": 3.0, "b": 1.0}},
        {
            "stage": STAGES,
            "weights": [
                {},
                {"z": 1.0},
                {"a": 0.0, "b": 0.0},
                *({"a": each, "b": 1.0} for each in SIZES),
                [],
                None,
            ],
            "forecast": MAYBE,
        },
    ),
    "avoid_instance": ({"sid": "a"}, {"sid": SIDS, "forecast": MAYBE}),
    "use_backup": (
        {"sid": "a", "backup": "b"},
        {"sid": SIDS, "backup": ["a", "c", *SIDS], "forecast": MAYBE},
    ),
    "move_instance": (
        {"sid": "a", "stage": 1, "forecast": GOOD},
        {"sid": SIDS, "stage": [0, *STAGES], "forecast": FORECASTS},
    ),
    "migrate": (
        {"sid": "a", "node": None, "forecast": GOOD},
        {"sid": SIDS, "node": ["", "no token", 5], "forecast": FORECASTS},
    ),
    "scale": ({"replicas": 3, "forecast": GOOD}, {"replicas": [4, 0.5, *NUMBERS], "forecast": FORECASTS}),
    "recut": (
        {"cuts": [[0, 1], [2, 3]], "revision": 0, "forecast": GOOD},
        {
            "cuts": [[[0, 3]], [[0, 1, 2]], [[-1, 1], [2, 3]], [["x", 1], [2, 3]], "0-1", 5],
            "revision": [-1, 0.5, "x", math.inf],
            "forecast": FORECASTS,
        },
    ),
    "set_window": (
        {"stage": 0, "in_flight": 3, "forecast": GOOD},
        {"stage": STAGES, "in_flight": [1025, 0.5, *NUMBERS], "forecast": FORECASTS},
    ),
    "set_rate": (
        {"per_s": 9.0, "forecast": GOOD},
        {"per_s": [0.01, 1.0, 1e7, *NUMBERS], "forecast": FORECASTS},
    ),
    "set_reduction": (
        {"stage": 0, "parts": {"a": 3.0}, "order": ["b", "a"], "forecast": GOOD},
        {
            "stage": STAGES,
            "parts": [
                {"z": 1.0},
                {"a": 0.0, "b": 0.0},
                *({"a": each} for each in SIZES),
                {"no token": 1.0},
                [],
                None,
            ],
            "order": [["a", "a"], ["z"], ["no token"], "a", 5, None],
            "forecast": FORECASTS,
        },
    ),
    "set_algorithm": (
        {"algorithm": "round-robin", "forecast": GOOD},
        {"algorithm": ["", "astrology", 5, None], "forecast": FORECASTS},
    ),
    "checkpoint_now": ({}, {}),
    "expect_failures": ({"between_s": 60.0}, {"between_s": NUMBERS}),
    "queue_order": (
        {"jobs": ["w"]},
        {"jobs": [[], ["w", "w"], ["stranger"], ["no token"], ["w"] * 257, "w", 5, None]},
    ),
    "roll_back": (
        {"service": "chat", "version": "v2"},
        {"service": ["others", "", 5, None], "version": ["v1", "v9", "", "no token", 5, None]},
    ),
    "set_traffic": (
        {"service": "chat", "weights": {"v1": 9_000, "v2": 1_000}, "expected": 3},
        {
            "service": ["others", "", 5, None],
            "weights": [
                *({}, {"v1": 9_999}, {"v1": 10_001, "v2": -1}, {"v9": 10_000}, {"no token": 10_000}),
                *({"v1": 0.5}, {f"v{number}": 1 for number in range(65)}, [], None),
            ],
            "expected": ["x", 0.5, None],
        },
    ),
    "none": ({"note": "hm"}, {"note": [5, None]}),
}


def wrong() -> Iterator[Any]:
    for action, (_, fields) in VOCABULARY.items():
        yield pytest.param(action, "action", ["", "dance", 5, None], id=f"{action}.action")
        for field, values in fields.items():
            yield pytest.param(action, field, values, id=f"{action}.{field}")


def sent(action: str, body: dict[str, Any]) -> bytes:
    return envelope(subjects.SUGGESTION, body={**SUGGESTED, "action": {"action": action, **body}})


def judged(data: bytes) -> tuple[str, int, ArbitrationState, ArbitrationState]:
    """What is said of it, how many strikes it cost, and the state before and after, without reputations."""
    lifecycle = ModuleLifecycle(module="m", version="1", state=ModuleState.ACTIVE)
    before = register(ArbitrationState(), lifecycle, 0.0)
    try:
        suggestion, _ = codec.decode(data, PolicySuggestion)
    except BadMessage as error:  # what `Subscription` counts and buries, before it says so
        said, after = (
            error.text,
            replace(before, modules=unreadable(before.modules, error.text, 1.0, owner=MESH, module="m")),
        )
    else:
        assert isinstance(suggestion, PolicySuggestion)
        outcome, after = arbitrate(before, suggestion, FACTS, 1.0)
        assert not outcome.adopted or outcome.reason.startswith(("adopted: ", "passed on: "))
        said = outcome.reason
    strikes = after.modules["m", "1"].strikes
    return said, strikes, replace(before, modules={}), replace(after, modules={})


def test_the_table_names_each_field_of_each_action() -> None:
    named = {action: {"action", *fields} for action, (_, fields) in VOCABULARY.items()}
    assert named == {kind.model_fields["action"].default: set(kind.model_fields) for kind in get_args(Action)}


@pytest.mark.parametrize("action", VOCABULARY)
def test_what_is_right_costs_no_strike(action: str) -> None:
    said, strikes, _, _ = judged(sent(action, VOCABULARY[action][0]))
    assert strikes == 0, said
    assert said.startswith(("adopted: ", "passed on: ", "an observation, nothing to adopt")), said


@pytest.mark.parametrize(("action", "field", "values"), wrong())
def test_each_wrong_field_is_one_line_and_a_strike_and_changes_nothing(
    action: str, field: str, values: list[Any]
) -> None:
    good, _ = VOCABULARY[action]
    for value in values:
        said, strikes, before, after = judged(sent(action, {**good, field: value}))
        assert said, value
        assert "\n" not in said
        assert len(said) < 500
        assert (strikes, after) == (1, before), f"{value!r}: {said}"
