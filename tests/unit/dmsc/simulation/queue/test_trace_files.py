"""Traces of jobs are read, and one line says what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmsc.simulation.queue.queue_settings import QueueSettings, queue_settings
from dmsc.simulation.queue.trace_files import TraceLine, read_trace
from dmsc.simulation.queue.trace_run import in_lines, run_trace
from entities.queue.queue_rules import QueueOrder
from schemas.errors import BadInput


def test_a_table(tmp_path: Path) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text(
        "job,submit_s,slots,run_s,min,max,tenant,after\na,5,2,100,1,4,x,b\nb,0,1,30,,,,\n", encoding="utf-8"
    )
    first, second = read_trace(trace)
    assert (first.submit_s, first.slots, first.run_s, first.least) == (0, 1, 30, None)
    assert (second.least, second.most, second.tenant, second.after) == (1, 4, "x", ("b",))


def test_a_trace_of_gavel(tmp_path: Path) -> None:
    (tmp_path / "seed").mkdir()
    speeds = {"v100": {"('LM (batch size 5)', 1)": {"null": 2.0}, "('LM (batch size 5)', 2)": {"null": 0.0}}}
    (tmp_path / "simulation_throughputs.json").write_text(json.dumps(speeds), encoding="utf-8")
    trace = tmp_path / "seed" / "a.trace"
    trace.write_text("LM (batch size 5)\tcd\t-n\t1\t600\t7.5\t2\n", encoding="utf-8")
    (line,) = read_trace(trace)
    assert (line.submit_s, line.slots, line.run_s) == (7.5, 2, 300.0)
    for broken in ("{", "[]", '{"v100": {"LM": {}}}'):
        (tmp_path / "simulation_throughputs.json").write_text(broken, encoding="utf-8")
        with pytest.raises(BadInput, match=r"simulation_throughputs.json: no speeds of v100"):
            read_trace(trace)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", ":1: no column submit_s, slots, run_s"),
        ("submit_s,slots,run_s\n1,0,5\n", ":2: 0 slots for 5.0 s: both have to be above 0"),
        ("submit_s,slots,run_s\n1,two,5\n", ":2: slots is two: give a number"),
        ("submit_s,slots,run_s\n1,1,5\n\n1,two,5\n", ":4: slots is two: give a number"),
        ("submit_s,slots,run_s\n1,1.5,5\n", ":2: slots is 1.5: give a whole number"),
        ("submit_s,slots,run_s\nnan,1,5\n", ":2: submit_s is nan: give a number"),
        ("submit_s,slots,run_s\n1,1\n", ":2: run_s is missing: give a number"),
        ("submit_s,slots,run_s\n1,1,1e308\n", ":2: run_s is 1e308: give a number up to 1e+12"),
        ("submit_s,slots,run_s,min\n1,2,5,3\n", ":2: min 3, slots 2, max None: give 1 ≤ min ≤ slots ≤ max"),
        ("submit_s,slots,run_s,min\n1,2,5,-1\n", ":2: min -1, slots 2, max None: give 1 ≤ min"),
        ("submit_s,slots,run_s,deadline_s\n1,2,5,inf\n", ":2: deadline_s is inf: give a number"),
        ("submit_s,slots,run_s,job\n1,2,5,a\n1,2,5,a\n", "2 jobs are called a: give each a name of its own"),
        ("submit_s,slots,run_s,job,after\n1,2,5,a,z\n", "a is after z, which the trace does not have"),
        (
            "submit_s,slots,run_s,job,after\n1,2,5,a,b\n1,2,5,b,a\n",
            "the column after has a cycle: a before b before a: drop one",
        ),
        ("submit_s,slots,run_s\n", "the trace has no job"),
        ("a\tb\n", ":1: no line of Gavel"),
        ("a\t\t\t\tnan\t1\t1\n", ":1: nan steps on 1 devices from 1 s: give finite numbers"),
    ],
)
def test_what_is_wrong_with_a_trace(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "simulation_throughputs.json").write_text('{"v100": {}}', encoding="utf-8")
    trace = tmp_path / "jobs"
    trace.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput) as refused:
        read_trace(trace)
    assert problem in refused.value.text
    assert str(trace) in refused.value.text


def test_settings_and_what_is_wrong_with_them() -> None:
    settings = queue_settings(["order=las", "slots=4", "estimates=[1, 2]"])
    assert (settings.order, settings.slots, settings.estimates) == (QueueOrder.LAS, 4, (1.0, 2.0))
    for override, problem in (
        ("sots=4", "give KEY=VALUE with one of slots,"),
        ("order=lifo", "--set order: Input should be 'fcfs', 'priority', 'fair' or 'las'; given 'lifo'"),
        ("estimates=[2, 1]", "the lower first"),
        ("estimates=[1, .inf]", "the lower first"),
        ("cool_down_s=.inf", "--set cool_down_s: Input should be a finite number"),
    ):
        with pytest.raises(BadInput) as refused:
            queue_settings([override])
        assert problem in refused.value.text


def test_a_trace_is_run_to_its_end() -> None:
    lines = [TraceLine(job=f"j{number}", submit_s=0, slots=2, run_s=3600) for number in range(4)]
    rigid = run_trace(lines, QueueSettings(slots=4))
    assert (rigid.jobs, rigid.mean_completion_h, rigid.longest_wait_h) == (4, 1.5, 1.0)
    assert rigid.busy == pytest.approx(1.0)
    with pytest.raises(BadInput, match="no job of the trace fits 1 slots: --set slots=2 lets one in"):
        run_trace(lines, QueueSettings(slots=1))
    small = TraceLine(job="small", submit_s=0, slots=1, run_s=36)
    after = TraceLine(job="after", submit_s=0, slots=1, run_s=36, after=("j0",))
    left = run_trace([*lines, small, after], QueueSettings(slots=1))
    assert (left.jobs, left.too_large, left.never) == (1, 4, 1)
    assert in_lines(left)[:2] == [
        "1 jobs, 4 left out: the mesh is too small for them, 1 never started: they are after jobs left out; "
        "the last ended after 36 s, slots 100% busy",
        "completion: mean 36 s, median 36 s",
    ]
    elastic = run_trace(lines[:1], QueueSettings(slots=4, elastic=True))
    assert elastic.mean_completion_h == pytest.approx(1 / 1.8, rel=0.01)
