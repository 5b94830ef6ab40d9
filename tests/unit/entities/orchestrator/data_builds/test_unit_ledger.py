"""Any order of results, losses, failures, takeovers: each unit is committed once, with the same results."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import pytest

from entities.orchestrator.data_builds.unit_ledger import (
    LOST_ATTEMPTS,
    AgentLoad,
    CommitUnit,
    Effect,
    StopBuild,
    Unit,
    UnitLedger,
    UnitState,
    choose_agent,
)
from schemas.data_set.units import SourceUnit, StoredObject, UnitOrder, UnitResult
from schemas.errors import IllegalTransition, Unavailable

AGENTS = ("a", "b", "c")
Rows = dict[str, tuple[UnitResult, str]]


def _orders(count: int) -> dict[str, UnitOrder]:
    unit = SourceUnit(files=("x.txt",), bytes=1, versions=("1",))
    return {f"k{index}": UnitOrder(phase="records", index=index, unit=unit) for index in range(count)}


def _result(index: int, rows: int = 3) -> UnitResult:
    digest = hashlib.sha256(f"{index} {rows}".encode()).hexdigest()
    return UnitResult(
        phase="records",
        index=index,
        outputs={"records": StoredObject(sha256=digest, bytes=9)},
        rows_in=rows,
        kept={"records": rows},
    )


class _World:
    """A ledger with its bucket: rows are created once; a takeover makes the ledger anew of them."""

    def __init__(self, count: int, functions: str) -> None:
        self.orders = _orders(count)
        self.rows: Rows = {}
        self.creations: list[str] = []
        self.functions = functions
        self.ledger = self.made()

    def made(self) -> UnitLedger:
        return UnitLedger("records", self.orders, self.rows, skips=True, functions=self.functions)

    def carry_out(self, effect: Effect, lost: bool) -> None:
        """`lost`: the leader dies between the row and its own ledger."""
        assert not isinstance(effect, StopBuild), effect
        if isinstance(effect, CommitUnit):
            if effect.unit not in self.rows:
                self.rows[effect.unit] = (effect.result, effect.skipped)
                self.creations.append(effect.unit)
            if not lost:
                assert self.ledger.commit(effect.unit, *self.rows[effect.unit]) is None


@pytest.mark.parametrize("seed", range(200))
def test_each_unit_is_committed_once_whatever_happens(seed: int) -> None:
    draw = random.Random(seed)
    world = _World(draw.randrange(1, 60), functions=draw.choice(("", "m:f")))
    unreadable = {f"k{index}" for index in range(60) if draw.random() < 0.05}
    takeovers = losses = 0
    while not world.ledger.complete:
        ledger = world.ledger
        for unit in list(ledger.planned())[: draw.randrange(1, 5)]:
            ledger.bind(unit.key, draw.choice(AGENTS))
        bound = ledger.bound()
        unit = draw.choice(bound)
        index, agent, what = unit.order.index, unit.agent, draw.random()
        if what < 0.1:
            ledger.unbind(agent)
            losses += 1
        elif what < 0.2:
            world.carry_out(ledger.failed(unit.key, agent, Unavailable.code, "lost"), False)
        elif what < 0.25:
            world.ledger = world.made()
            takeovers += 1
        elif unit.key in unreadable:
            world.carry_out(ledger.failed(unit.key, agent, "bad_data", "no JSON"), False)
        else:
            dies = draw.random() < 0.05
            world.carry_out(ledger.done(unit.key, agent, _result(index)), dies)
            if dies:
                world.ledger = world.made()
                takeovers += 1
            elif draw.random() < 0.2:  # it comes again
                world.carry_out(world.ledger.done(unit.key, agent, _result(index)), False)
    assert sorted(world.creations) == sorted(world.orders), f"seed {seed}"
    skipped = {key for key, (_, why) in world.rows.items() if why}
    assert skipped == unreadable & world.orders.keys()
    expected = [_result(order.index) for key, order in world.orders.items() if key not in skipped]
    assert world.ledger.results() == expected
    assert takeovers + losses or len(world.orders) < 60


def _bound(functions: str = "", skips: bool = False) -> tuple[UnitLedger, Unit]:
    ledger = UnitLedger("records", _orders(1), {}, skips=skips, functions=functions)
    return ledger, ledger.bind("k0", "a")


def test_a_second_other_result_ends_the_build_and_names_unit_and_step() -> None:
    ledger, _ = _bound("my_steps:noise")
    assert ledger.done("k0", "a", _result(0)) is None  # computed twice, as it has functions of users
    ledger.bind("k0", "b")
    stop = ledger.done("k0", "b", _result(0, rows=4))
    assert isinstance(stop, StopBuild)
    assert "unit 0 of records" in stop.reason
    assert "my_steps:noise is not a pure function" in stop.reason
    assert "\n" not in stop.reason


def test_a_row_that_differs_from_what_was_found_ends_the_build() -> None:
    ledger, _ = _bound()
    effect = ledger.done("k0", "a", _result(0))
    assert isinstance(effect, CommitUnit)
    assert isinstance(ledger.commit("k0", _result(0, rows=4)), StopBuild)


def test_an_unreadable_unit_is_tried_twice_elsewhere_then_the_build_stops() -> None:
    ledger, unit = _bound()
    assert ledger.failed("k0", "a", "bad_data", "x.txt: cut off") is None
    loads = [AgentLoad("a", 2, 0), AgentLoad("b", 1, 0)]
    assert choose_agent(unit, loads, 1.0) == "b"
    assert choose_agent(unit, [AgentLoad("a", 2, 0), AgentLoad("b", 1, 1)], 1.0) is None  # b is soon free
    ledger.bind("k0", "b")
    assert ledger.failed("k0", "b", "bad_data", "x.txt: cut off") is None
    assert choose_agent(unit, loads, 1.0) == "a"  # all have tried: the one that did so longest ago
    ledger.bind("k0", "a")
    assert ledger.failed("k0", "a", "bad_data", "x.txt: cut off") == StopBuild(
        "unit 0 of records: x.txt: cut off", "bad_data"
    )


def test_a_function_that_raises_ends_the_build_at_once() -> None:
    ledger, _ = _bound("m:f")
    assert isinstance(ledger.failed("k0", "a", "bad_model", "m:f raised"), StopBuild)


def test_what_kills_each_process_ends_the_build_in_the_end() -> None:
    ledger = UnitLedger("records", _orders(1), {})
    effect: Effect = None
    for _ in range(LOST_ATTEMPTS):
        assert effect is None
        ledger.bind("k0", "a")
        effect = ledger.failed("k0", "a", Unavailable.code, "ended by SIGKILL")
    assert isinstance(effect, StopBuild)


def test_a_result_of_another_unit_counts_for_nothing() -> None:
    ledger, unit = _bound()
    assert ledger.done("k0", "a", _result(7)) is None
    assert unit.state is UnitState.PLANNED
    assert ledger.done("k9", "a", _result(9)) is None


def test_an_illegal_transition_says_which_unit() -> None:
    ledger, _ = _bound()
    with pytest.raises(IllegalTransition, match="unit 0 of records: bound → bound"):
        ledger.bind("k0", "b")


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([AgentLoad("a", 4, 3), AgentLoad("b", 4, 1)], "b"),  # the emptier one
        ([AgentLoad("a", 4, 1, 1.0), AgentLoad("b", 4, 1, 9.0)], "a"),  # the faster one
        ([AgentLoad("a", 8, 3), AgentLoad("b", 2, 1)], "a"),  # the one with more room
        ([AgentLoad("a", 1, 1), AgentLoad("b", 2, 2)], None),  # all have as many as they take
        ([], None),
    ],
)
def test_a_unit_goes_where_it_is_expected_to_end_first(loads: list[AgentLoad], chosen: str | None) -> None:
    (order,) = _orders(1).values()
    assert choose_agent(Unit("k0", order), loads, 2.0) == chosen


def test_rows_that_are_there_are_not_done_again() -> None:
    rows: Mapping[str, tuple[UnitResult, str]] = {"k1": (_result(1), ""), "other": (_result(5), "")}
    ledger = UnitLedger("records", _orders(3), rows)
    assert ledger.reused == 1
    assert [unit.key for unit in ledger.planned()] == ["k0", "k2"]
