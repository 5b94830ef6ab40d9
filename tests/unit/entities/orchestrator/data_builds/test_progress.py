"""Figures of a phase: what was committed, how fast, and how long it will take."""

from __future__ import annotations

from entities.orchestrator.data_builds.progress import UnitTimes, pace, progress_of
from entities.orchestrator.data_builds.unit_ledger import UnitLedger
from schemas.data_set.units import SourceUnit, UnitOrder, UnitResult


def _ledger() -> UnitLedger:
    unit = SourceUnit(files=("x",), bytes=100, versions=("1",))
    orders = {f"k{index}": UnitOrder(phase="records", index=index, unit=unit) for index in range(4)}
    result = UnitResult(phase="records", index=0, rows_in=10, kept={"records": 7}, dropped={"length": 3})
    return UnitLedger("records", orders, {"k0": (result, "")})


def test_progress_counts_committed_units() -> None:
    ledger, times = _ledger(), UnitTimes()
    ledger.bind("k1", "a")
    times.take("a", 4.0)
    times.take("b", 2.0)
    found = progress_of(ledger, times)
    assert (found.units, found.committed, found.reused, found.working, found.left) == (4, 1, 1, 1, 3)
    assert (found.rows_in, found.kept, found.dropped) == (10, {"records": 7}, {"length": 3})
    assert (found.bytes_in, found.unit_s) == (100, 3.0)
    assert (times.of("a"), times.of("c")) == (4.0, None)


def test_pace_counts_only_what_this_leader_has_seen() -> None:
    ledger, times = _ledger(), UnitTimes()
    assert pace(progress_of(ledger, times), 10, 5.0) == (0.0, None)
    ledger.bind("k1", "a")
    result = UnitResult(phase="records", index=1, rows_in=20, kept={"records": 20})
    ledger.done("k1", "a", result)
    ledger.commit("k1", result)
    assert pace(progress_of(ledger, times), 10, 5.0) == (4.0, 10.0)  # 20 rows in 5 s; two units of 5 s left
