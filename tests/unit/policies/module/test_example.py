"""The example policy: short, and what it suggests on any stage of two is worth adopting."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus import subjects
from dmsc.process.policy_loading import load_policy
from entities.orchestrator.policy.arbitration import ArbitrationState, arbitrate, register
from entities.orchestrator.policy.suggestion_rules import JobFacts
from policies.kit.engine import Engine, EngineConfig, Event
from schemas.policy import ModuleLifecycle, ModuleState
from tests.builders.telemetry import sample

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "my_policy.py"


def test_it_is_at_most_thirty_lines_long():
    assert len(EXAMPLE.read_text().splitlines()) <= 30


@pytest.mark.parametrize("slow", [10.0, 10.1, 25.0, 500.0])
def test_it_is_adopted_whatever_the_service_times(slow):
    engine = Engine(load_policy(str(EXAMPLE)), EngineConfig())
    for sid, ms in (("j-s0-r0", 10.0), ("j-s0-r1", slow)):
        engine.take([Event(row=subjects.INSTANCE_SAMPLE, message=sample(sid, service_ms=ms), id=sid, at=1.0)])
    [suggestion] = engine.decide(1.0).suggestions
    assert suggestion.action.weights[f"j-s0-r{1 if slow > 10 else 0}"] == (0.5 if slow >= 20 else 0.8)
    alive = ModuleLifecycle(module=suggestion.module, version="1", state=ModuleState.ACTIVE)
    facts = JobFacts(active={0: ("j-s0-r0", "j-s0-r1")}, weights={}, revision=1, step=1)
    outcome, _ = arbitrate(register(ArbitrationState(), alive, 0.0), suggestion, facts, 1.0)
    assert outcome.adopted
    assert outcome.weights is not None
