"""Stalls, goodput, waste and the verdict, on made-up runs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from dmsc.chaos import plot, present
from dmsc.chaos.history import ComputedWork, History, read
from dmsc.chaos.plan import FaultKind
from dmsc.chaos.report import (
    ChaosReport,
    Clean,
    InjectedFault,
    clean_of,
    make_report,
    measure_waste,
    quantile,
)
from schemas.job import JobEvent
from tests.builders.job_events import EVERYONE, MICROBATCHES, clean, noticed
from tests.builders.job_events import committed as step

CLEAN = Clean(step_s=1.0, steps_per_s=1.0, sha256="same", job="clean")


def fault(number: int, at: float, kind: FaultKind = FaultKind.INSTANCE, **more: object) -> InjectedFault:
    return InjectedFault(number=number, kind=kind, at=at, victim="j-s0-r0", incarnations=("dead",), **more)


def run(seconds: list[float]) -> list[JobEvent]:
    """A run whose steps took so long."""
    events, at = [EVERYONE], 0.0
    for number, step_s in enumerate(seconds):
        at += step_s
        events.append(step(number, at, step_s=step_s))
    return events


def history(events: list[JobEvent]) -> History:
    return read(events, (), microbatches=MICROBATCHES, steps=sum(event.kind == "step" for event in events))


def report(events: list[JobEvent], faults: list[InjectedFault], **changes: object) -> ChaosReport:
    body: dict[str, object] = {
        "job": "j",
        "state": "done",
        "reason": "",
        "seed": 1,
        "every": "10s",
        "steps": len(events) - 1,
        "samples_per_step": 8,
        "faults": faults,
        "clean": CLEAN,
        "history": history(events),
        "work": ComputedWork(),
        "units_per_step": 8,
        "recoveries": 1,
        "sha256": "same",
    }
    return make_report(**{**body, **changes})


def test_a_stall_is_the_faulted_steps_time_less_a_clean_step() -> None:
    found = report(run([1, 1, 2.5, 1, 1, 4, 1]), [fault(0, 2.7), fault(1, 6.6)])
    assert [(stall.step, round(stall.stall_s, 6)) for stall in found.stalls] == [(2, 1.5), (5, 3.0)]
    assert found.stall_s(0.5) == pytest.approx(2.25)
    assert found.stall_s(0.95) == pytest.approx(2.925)
    assert found.stall_s(1.0) == pytest.approx(3.0)
    assert found.stall_s(0.5, "freeze") is None


def test_faults_in_one_step_share_its_stall() -> None:
    found = report(run([1, 1, 5, 1]), [fault(0, 2.5), fault(1, 6.9, FaultKind.SERVER), fault(2, 7.1)])
    assert [(stall.step, stall.faults, stall.kinds) for stall in found.stalls] == [
        (2, (0, 1), ("instance", "server")),
        (3, (2,), ("instance",)),
    ]


def test_a_fault_at_the_very_commit_belongs_to_the_step_that_it_ends() -> None:
    assert [stall.step for stall in report(run([1, 1, 1]), [fault(0, 2.0)]).stalls] == [1]


def test_faults_outside_of_training_and_such_that_missed_have_no_stall() -> None:
    found = report(run([1, 1, 1]), [fault(0, 99.0), fault(1, 1.5, missed="nobody to hit"), fault(2, 2.5)])
    assert [stall.faults for stall in found.stalls] == [(2,)]


def test_goodput_is_the_rate_of_commits_over_that_of_the_clean_run() -> None:
    # the first step is the ramp in both runs: three steps in 6 s, against one a second
    assert report(run([3, 1, 4, 1]), [fault(0, 5.0)]).goodput == pytest.approx(0.5)


def test_without_a_clean_run_the_own_quiet_steps_stand_in() -> None:
    found = report(run([1, 2, 9, 2, 2]), [fault(0, 4.0)], clean=None)
    assert (found.clean.step_s, found.clean.measured, found.hash_equal) == (2.0, False, None)
    assert [round(stall.stall_s, 6) for stall in found.stalls] == [7.0]
    assert found.problems() == []


def test_the_clean_runs_figures_leave_the_first_step_out() -> None:
    found = clean_of(history(run([9, 1, 3, 1])).advances, sha256="x", job="c")
    assert found is not None
    assert (found.step_s, found.steps_per_s) == (1.0, pytest.approx(3 / 5))
    assert clean_of(history(clean(1)).advances, sha256=None, job="c") is None


def test_waste_is_what_was_computed_again_over_what_the_dead_had() -> None:
    advances = history(run([1, 1, 2, 1])).advances
    work = ComputedWork(
        units={0: 8, 1: 8, 2: 11, 3: 8}, by_owner={(2, "dead"): 2, (2, "alive"): 9, (1, "dead"): 4}
    )
    found = measure_waste(advances, [fault(0, 2.5)], work, 8)
    assert (found.ratio, found.recomputed, found.dead_had) == (1.5, 3, 2)
    assert found.fraction == pytest.approx(3 / 35)


def test_waste_is_unknown_where_claims_are_missing_and_none_of_a_servers_death() -> None:
    advances = history(run([1, 1, 2, 1])).advances
    work = ComputedWork(units={0: 8, 1: 8, 2: 7, 3: 8}, by_owner={(2, "dead"): 2})
    found = measure_waste(advances, [fault(0, 2.5)], work, 8)
    assert (found.ratio, found.unknown_steps) == (None, 1)
    assert measure_waste(advances, [fault(0, 2.5, FaultKind.SERVER)], work, 8).unknown_steps == 0


def test_a_good_run_has_no_problems() -> None:
    assert report(run([1, 1, 2, 1]), [fault(0, 2.5)]).problems() == []


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"sha256": "other"}, "the weights differ"),
        ({"state": "failed", "reason": "no room"}, "the job ended failed: no room"),
        ({"history": read(run([1, 1]), (), microbatches=MICROBATCHES, steps=4)}, "never committed: 2, 3"),
        (
            {
                "history": read(
                    [*run([1, 1]), step(1, 3.0, step_s=0.9)], (), microbatches=MICROBATCHES, steps=2
                )
            },
            "committed twice: 1",
        ),
        ({"faults": []}, "no fault fired"),
        ({"faults": [fault(0, 2.5), fault(1, 2.6, missed="pid 7 did not end", failed=True)]}, "did not fire"),
    ],
)
def test_each_broken_promise_is_a_problem_and_so_an_exit_code(
    changes: dict[str, object], wanted: str
) -> None:
    found = report(run([1, 1, 2, 1]), **{"faults": [fault(0, 2.5)], **changes})
    assert any(wanted in line for line in found.problems()), found.problems()


def test_steps_that_are_computed_again_are_a_problem_where_all_faults_were_notices() -> None:
    back = [*run([1.0, 1.0]), noticed("recovery", "all back to step 1"), step(1, 3.0, step_s=0.9)]
    again = read(back, (), microbatches=MICROBATCHES, steps=2)
    leaves, dies = fault(0, 1.5, FaultKind.NOTICE), fault(1, 1.6)
    line = "steps computed again although there was notice: 1"
    assert report(back, [leaves], history=again).problems() == [line]
    assert report(back, [leaves, dies], history=again).problems() == []
    assert report(run([1.0, 1.0]), [leaves]).problems() == []


def test_the_quantile_is_numpys() -> None:
    assert quantile([3.0], 0.95) == 3.0
    assert quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert quantile([1.0, 2.0], 1.0) == 2.0


def test_the_report_is_json_a_table_and_a_picture() -> None:
    found = report(run([1, 1, 2, 1]), [fault(0, 2.5), fault(1, 3.5, FaultKind.SERVER)])
    body = json.loads(json.dumps(found.as_dict()))
    assert body["stalls"]["count"] == 1
    assert body["faults"][0]["at"] == 2.5
    assert body["hash_equal"] is True
    table = {name: figure for name, figure, _ in present.rows(found)}
    assert table["faults"] == "2"
    assert table["lost"] == "0"
    assert table["sha256"] == "equal"
    assert present.closing(found)[-1].startswith("✓")
    picture = ElementTree.fromstring(plot.svg(found))
    assert picture.tag.endswith("svg")
    assert [each.text for each in picture.iter() if each.tag.endswith("title")].count("j-s0-r0") == 2


def test_the_curve_is_throughput_over_time_with_the_faults_below() -> None:
    found = report(run([1, 1, 4, 1, 1]), [fault(0, 2.5)])
    assert sum(plot.rates(found, 8)) == pytest.approx(5 * 8)  # samples of five steps, one second a column
    curve, marks = plot.lines(found, 8)
    assert curve == "██▂▂▂▂██"
    assert marks == "  i     "


def test_a_run_that_never_began_can_be_shown() -> None:
    found = report([EVERYONE], [], state="failed", reason="no room", sha256=None, clean=None)
    assert present.closing(found) == ["✗ the job ended failed: no room", "✗ no fault fired"]
    assert ElementTree.fromstring(plot.svg(found)) is not None
    assert replace(found, faults=()).as_dict()["goodput"] is None
