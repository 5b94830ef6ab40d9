"""What a soak at the edges makes of the reports of its runs, and that it goes on where it left off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak_edges import KINDS, Kept, broken, flaws, rows, run_of


def report(**more: Any) -> dict[str, Any]:
    """Faults at 10, 20, 30 and 40 s; a step a second, except while the server stands still, from 10 to 30."""
    faults = [
        {"kind": kind.value, "at": 10.0 * number, "fired": True} for number, kind in enumerate(KINDS, start=1)
    ]
    ends = [*(float(n) for n in range(1, 11)), *(30.5 + n for n in range(20))]
    timeline = [[step, end - 1.0, end] for step, end in enumerate(ends)]
    told = {"state": "done", "problems": [], "false_evictions": 0, "sha256": "aa"}
    return told | {"faults": faults, "timeline": timeline} | more


def test_a_job_goes_on_with_the_first_step_after_the_end_of_a_fault() -> None:
    run = run_of(1, report())
    assert run.goes_on_s == {
        "server-freeze": [0.5],  # it stood still for 20 s
        "disk-full": [5.5],  # full for 5 s, and then the server still stood
        "garbage-value": [0.5],
        "no-room": [0.5],
    }
    table = rows([run, run_of(2, report())])
    assert table[0] == ("server-freeze", "2", "0.5 s", "0.5 s", "", "", "")
    assert table[-1] == ("all", "8", "", "", "0", "0", "2 of 2")
    assert flaws([run]) == []


@pytest.mark.parametrize(
    ("more", "flaw"),
    [
        ({"state": "failed", "problems": ["the job ended failed: no"]}, "seed 2: the job ended failed: no"),
        ({"false_evictions": 1}, "seed 2: 1 instances were evicted without a fault"),
        ({"sha256": "bb"}, "seed 2: the weights differ"),
        ({"faults": report()["faults"][1:]}, "seed 2: server-freeze did not come about"),
        (
            {"timeline": [[step, at, at + 1.0] for step, at in enumerate((8.0, 34.8, 35.3, 45.0))]},
            "seed 2: 10.8 s after disk-full until the job went on, and 10 s is the most",
        ),
    ],
)
def test_each_flaw_is_named_with_its_seed(more: dict[str, Any], flaw: str) -> None:
    assert flaws([run_of(1, report()), run_of(2, report(**more))]) == [flaw]


def test_a_soak_goes_on_where_it_left_off_and_not_with_another_one(tmp_path: Path) -> None:
    kept = Kept(tmp_path, seed=1)
    kept.add(run_of(1, report()))
    kept.add(broken(2, "no end within 420 s"))
    again = Kept(tmp_path, seed=1)
    assert again.runs == kept.runs
    assert rows(again.runs)[-1][4:] == ("1", "0", "1 of 2")
    assert len(json.loads((tmp_path / "soak.json").read_text())["runs"]) == 2
    with pytest.raises(SystemExit, match="another job, plan or seed"):
        Kept(tmp_path, seed=5)
