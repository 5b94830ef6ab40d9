"""A module's standing as a record and back, on another clock."""

from __future__ import annotations

from dataclasses import replace

from entities.orchestrator.policy.module_reputation import ModuleReputation, OrderedState
from entities.orchestrator.policy.reputation_store import as_record, from_record
from schemas.policy import ModuleState

STANDING = ModuleReputation(
    sid="m-1",
    incarnation="i",
    state=ModuleState.SHADOW,
    jobs=("a",),
    without=("b",),
    said="s",
    wanted=OrderedState(state=ModuleState.SHADOW, enabled=frozenset({"a"}), disabled=frozenset({"b"})),
    crashed_at=(10.0, 20.0),
    suspended_until=320.0,
    suspended_for="2 crashes",
    suggestions=7,
    adopted=3,
    strikes=2,
    crashes=2,
)


def test_there_and_back_on_another_clock() -> None:
    record = as_record(("m", "1"), STANDING, since_epoch=1_000.0)
    assert (record.crashed_at, record.suspended_until) == ((1010.0, 1020.0), 1320.0)
    later = from_record(record, since_epoch=400.0)
    assert later == replace(STANDING, crashed_at=(610.0, 620.0), suspended_until=920.0)


def test_one_that_was_never_suspended() -> None:
    free = replace(STANDING, suspended_until=ModuleReputation().suspended_until, suspended_for="")
    record = as_record(("m", "1"), free, since_epoch=1_000.0)
    assert record.suspended_until is None
    assert from_record(record, since_epoch=1_000.0) == free
