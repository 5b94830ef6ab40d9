"""The orders of a build's phases: a function of the file and earlier results, whoever asks."""

from __future__ import annotations

from typing import Any

import pytest

from entities.orchestrator.data_builds.phases import Results, orders_of, phases_of
from schemas.data_set.build_file import DataBuildSpec
from schemas.data_set.units import MOST_UNITS, SourceUnit, StoredObject, UnitResult
from schemas.errors import BadData

STORED = StoredObject(sha256="ab" * 32, bytes=5)


def _spec(**changes: Any) -> DataBuildSpec:
    steps = [{"function": "exact_duplicates"}]
    return DataBuildSpec.model_validate({"name": "x", "source": "*.txt", "steps": steps, **changes})


def _plan(count: int, version: str = "1", **facts: Any) -> UnitResult:
    units = [SourceUnit(files=(f"{index}.txt",), bytes=7, versions=(version,)) for index in range(count)]
    return UnitResult(phase="plan", index=0, units=tuple(units), **facts)


def _records(*indexes: int) -> list[UnitResult]:
    outputs = {"records": STORED, "hashes": STORED}
    return [
        UnitResult(phase="records", index=index, outputs=outputs, rows_in=2, kept={"records": 2})
        for index in indexes
    ]


def test_the_phase_of_duplicates_is_there_if_a_step_needs_it() -> None:
    assert phases_of(_spec()) == ("plan", "records", "duplicates", "pack")
    assert phases_of(_spec(steps=[])) == ("plan", "records", "pack")


def test_orders_are_slim_and_leave_out_what_was_skipped() -> None:
    results: Results = {"plan": [_plan(6)], "records": _records(0, 1, 3, 4, 5)}
    (order,) = orders_of("duplicates", _spec(), results).values()
    assert [each.index for each in order.inputs] == [0, 1, 3, 4, 5]
    assert {*order.inputs[0].outputs} == {"hashes"}
    assert order.inputs[0].rows_in == 0
    dropped = UnitResult(phase="duplicates", index=0, outputs={"dropped": STORED})
    packs = [*orders_of("pack", _spec(group_units=4), {**results, "duplicates": [dropped]}).values()]
    inputs = [[(each.phase, each.index) for each in pack.inputs] for pack in packs]
    assert inputs[0] == [("records", 0), ("records", 1), ("records", 3), ("duplicates", 0)]
    assert inputs[1] == [("records", 4), ("records", 5), ("duplicates", 0)]


def test_keys_name_what_a_unit_depends_on() -> None:
    spec = _spec()
    keys = [*orders_of("records", spec, {"plan": [_plan(3)]})]
    assert keys == [*orders_of("records", spec, {"plan": [_plan(3)]})]
    assert len(set(keys)) == 3
    assert set(keys).isdisjoint(orders_of("records", spec, {"plan": [_plan(3, "2")]}))  # files have changed
    code = _plan(3, code_sha256="cd" * 32)
    assert set(keys).isdisjoint(orders_of("records", spec, {"plan": [code]}))  # other code on the nodes
    more = [*orders_of("records", spec, {"plan": [_plan(4)]})]
    assert more[:3] == keys  # one more file costs one unit


@pytest.mark.parametrize(("count", "text"), [(0, "nothing is there"), (MOST_UNITS + 1, "unit_bytes")])
def test_too_few_or_too_many_units_are_refused_in_one_line(count: int, text: str) -> None:
    with pytest.raises(BadData, match=text) as refused:
        orders_of("records", _spec(), {"plan": [_plan(count)]})
    assert "\n" not in refused.value.text
