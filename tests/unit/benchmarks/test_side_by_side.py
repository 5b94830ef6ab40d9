"""Today's software beside one of before: who goes first, what is compared, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.history import ROOT
from benchmarks.side_by_side import BARS, PARTS, Part, main, measured, orders, table, times_of, verdict


def test_who_goes_first_alternates() -> None:
    assert [first for first, _ in orders(5)] == ["before", "today", "before", "today", "before"]
    assert all({*order} == {"before", "today"} for order in orders(5))


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    """The machine was three times as slow during the last pair: its ratio is as good as the others'."""
    judged = [(1.0, 1.02), (1.0, 1.04), (3.0, 3.03)]
    found = verdict("claims", [((before, 1.0), (today, 2.0)) for before, today in judged])
    assert (found.median, found.least, found.most) == pytest.approx((1.02, 1.01, 1.04))
    assert found.by_the_clock == 2.0
    assert found.met


@pytest.mark.parametrize(
    ("name", "most"),
    [("connect", 1.5), *((name, 1.05) for name in ("publish", "consume", "claims", "notices", "samples"))],
)
def test_each_bar_is_met_at_it_and_missed_beyond(name: str, most: float) -> None:
    assert verdict(name, [((1.0, 1.0), (most, 9.0))]).met
    assert not verdict(name, [((1.0, 1.0), (most + 0.001, 0.5))]).met


def test_what_children_report_is_read_as_times() -> None:
    assert times_of("connect", {"connect": {"guarded_ms": 2.5}}) == {"connect": (0.0025, 0.0025)}
    figures = {"claims": {"per_s": 10.0, "cpu_s": 0.05}, "publish": {"per_s": 4.0, "cpu_s": 0.2}}
    assert times_of("messages", {"figures": figures}) == {"claims": (0.05, 0.1), "publish": (0.2, 0.25)}


def test_the_table_has_figures_ratios_and_bars() -> None:
    found = {
        "connect": verdict("connect", [((0.002, 0.002), (0.004, 0.004))]),
        "claims": verdict("claims", [((0.0001, 1.0), (0.0001, 3.0))]),
    }
    connect, claims = (" ".join(line.split()) for line in list(table(found))[1:])
    assert connect == "connect 2.00 ms 4.00 ms 2.000× (2.000–2.000) bar ≤ 1.5×: MISSED"
    assert claims == (
        "claims 100.00 µs 100.00 µs 1.000× (1.000–1.000) bar ≤ 5 % slower: met (3.000× by the clock)"
    )


@pytest.mark.parametrize("arguments", [["--pairs", "0"], ["--pairs", "x"], ["--only", "connect,all"]])
def test_wrong_options_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[1].rpartition(",")[2] in capsys.readouterr().err.splitlines()[-1]


def test_software_without_the_benchmark_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"^{tmp_path.name} has no benchmarks/doors.py"):
        measured("connect", tmp_path)


def test_a_child_that_fails_is_said_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "doors.py").write_text("raise SystemExit('no room')")
    with pytest.raises(SystemExit, match=rf"^doors.py on {tmp_path.name}: exit code 1: no room$"):
        measured("connect", tmp_path)


def test_a_child_says_whose_software_it_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a real server with its guard. A folder whose packages are ours in the end is noticed."""
    brief = Part("message_cost.py", ("--rounds", "1", "--messages", "50"), own=False)
    monkeypatch.setitem(PARTS, "messages", brief)
    other = tmp_path / "other"
    other.mkdir()
    for package in ("benchmarks", "bus", "entities", "schemas", "policies", "workers", "dmsc"):
        (other / package).symlink_to(ROOT / package)
    with pytest.raises(SystemExit, match=f"ran on {ROOT}, not on {other}"):
        measured("messages", other)
    times = measured("messages", ROOT)
    assert times.keys() == BARS.keys() - {"connect"}
    assert all(judged > 0 and by_the_clock > 0 for judged, by_the_clock in times.values())


def test_a_commit_that_is_not_there_ends_it_in_a_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.side_by_side", "--from", "no-such-commit"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert "no-such-commit" in line or "git" in line
