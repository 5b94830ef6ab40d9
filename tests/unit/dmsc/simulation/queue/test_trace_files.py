"""Traces of jobs are read, and one line says what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dmsc.simulation.queue.queue_settings import QueueSettings, queue_settings
from dmsc.simulation.queue.trace_files import TraceLine, read_trace
from dmsc.simulation.queue.trace_run import run_trace
from entities.queue.queue_rules import QueueOrder
from schemas.errors import BadInput


def test_a_table(tmp_path: Path) -> None:
    trace = tmp_path / "jobs.csv"
    trace.write_text(
        "submit_s,slots,run_s,min,max,tenant,after\n5,2,100,1,4,x,b\n0,1,30,,,,\n", encoding="utf-8"
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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n1,2\n", ":1: no column submit_s, slots, run_s"),
        ("submit_s,slots,run_s\n1,0,5\n", ":2: 0 slots for 5.0 s: both have to be above 0"),
        ("submit_s,slots,run_s\n1,two,5\n", ":2: invalid literal"),
        ("submit_s,slots,run_s,min\n1,2,5,3\n", ":2: min 3, slots 2, max None: give rising numbers"),
        ("submit_s,slots,run_s\n", "the trace has no job"),
        ("a\tb\n", ":1: no line of Gavel"),
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
    ):
        with pytest.raises(BadInput) as refused:
            queue_settings([override])
        assert problem in refused.value.text


def test_a_trace_is_run_to_its_end() -> None:
    lines = [TraceLine(job=f"j{number}", submit_s=0, slots=2, run_s=3600) for number in range(4)]
    rigid = run_trace(lines, QueueSettings(slots=4))
    assert (rigid.jobs, rigid.mean_completion_h, rigid.longest_wait_h) == (4, 1.5, 1.0)
    assert rigid.busy == pytest.approx(1.0)
    assert run_trace(lines, QueueSettings(slots=1)).too_large == 4
    elastic = run_trace(lines[:1], QueueSettings(slots=4, elastic=True))
    assert elastic.mean_completion_h == pytest.approx(1 / 1.8, rel=0.01)
