"""The comparison with an earlier step machine finds what differs, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from entities.orchestrator.transaction import step_events as ev
from tests.sim.answers import Answers
from tests.sim.compare import Different, FormerPackage, import_copy, record, replay, side_by_side
from tests.sim.test_step_transaction import PLANS
from tests.sim.world import World


@pytest.fixture
def same(tmp_path: Path) -> FormerPackage:
    """A copy of today's package, in the place of an earlier one."""
    return import_copy(tmp_path)


def test_a_machine_does_what_its_copy_does(same: FormerPackage) -> None:
    with side_by_side(same) as tally:
        for seed in range(3):
            Answers(seed).run()
        World(0, PLANS["joins and takeovers"]).run()
    assert tally["events"] > 1000
    assert tally["effects"] > 500


def test_another_effect_is_found(same: FormerPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same.machine, "_transfers", lambda machine: [])
    with side_by_side(same):
        schedule = World(0, PLANS["joins"])
        with pytest.raises(Different, match="SendState"):
            schedule.run()


def test_another_state_is_found(same: FormerPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same.machine, "settled", False)
    with side_by_side(same), pytest.raises(Different, match="settled"):
        Answers(0).run()


def test_a_recorded_run_is_given_to_both(same: FormerPackage, tmp_path: Path) -> None:
    with record(tmp_path):
        schedule = Answers(1)
        schedule.run()
    (file,) = tmp_path.glob("*.events")
    with side_by_side(same) as tally:
        machine = replay(file)
    assert tally["events"] > 100
    assert (machine.step, machine.history) == (schedule.machine.step, schedule.machine.history)
    assert machine.decide(ev.Tick(), 1e6) is not None
