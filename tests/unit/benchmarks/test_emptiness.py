"""Nothing measured is never a figure that keeps its bar: empty parts, other periods, no rounds."""

from __future__ import annotations

import gzip
import json
import math
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import job_queue
from benchmarks.fault_figures import Plan
from benchmarks.harness.command import bench, command
from benchmarks.harness.emptiness import NothingMeasured, both_classes, some, told, without_value
from benchmarks.harness.figures import Figure, Sheet, percentile, spread
from benchmarks.harness.sections import run_sections
from benchmarks.history import ROOT
from benchmarks.planner_sections import SECTIONS as PLANNER
from benchmarks.policy_data.fault_log import FILE
from benchmarks.policy_sections import SECTIONS
from benchmarks.policy_sections.scores import auroc, brier, calibration_error, error_ratio
from benchmarks.policy_sections.sheet import Bench, Row

EMPTY = np.zeros(0)
OF_NOTHING: dict[str, Callable[[], object]] = {
    "a median": lambda: statistics.median([]),
    "an extreme": lambda: max([]),
    "a ratio": lambda: 1 / len([]),
    "an array's extreme": lambda: EMPTY.max(),
    "a spread": lambda: spread([]),
    "a percentile": lambda: percentile([], 0.5),
    "a score": lambda: brier(EMPTY, EMPTY.astype(bool)),
    "a calibration": lambda: calibration_error(EMPTY, EMPTY.astype(bool)),
    "a ranking of one class": lambda: auroc(np.ones(3), np.zeros(3, dtype=bool)),
    "an error beside no change": lambda: error_ratio(np.ones(3), np.ones(3), np.ones(3)),
    "a figure": lambda: Figure(section="one", name="mean", value=math.nan),
    "a baseline": lambda: Row(section="one", name="mean", value=1.0, baselines={"other": math.nan}),
    "a run in which no fault fired": lambda: Plan(section="kills", fired=0).at_most("stall", 0.0, "s", 1.0),
}


@pytest.mark.parametrize("what", OF_NOTHING)
def test_each_count_over_nothing_is_told_in_a_line(what: str) -> None:
    with pytest.raises((NothingMeasured, ArithmeticError, ValueError)) as caught:
        OF_NOTHING[what]()
    line = told(caught.value)
    assert line is not None
    assert "\n" not in line


def test_other_errors_are_not_taken_for_it() -> None:
    for error in (ValueError("wrong"), KeyError("name"), RuntimeError("no")):
        assert told(error) is None


def test_a_part_that_is_whole_is_handed_on() -> None:
    assert some([1], "faults") == [1]
    both_classes([True, False], "faults")
    with pytest.raises(NothingMeasured, match=r"^no faults in log\.json; take a longer one$"):
        some([], "faults", "log.json", "take a longer one")
    with pytest.raises(NothingMeasured, match=r"^1 faults of 2 needed$"):
        some([1], "faults", least=2)
    with pytest.raises(NothingMeasured, match=r"^2 faults of one class only, all false, in log\.json$"):
        both_classes([False, 0], "faults", "log.json")


def test_a_result_with_nan_in_it_is_found() -> None:
    figures = {"rounds": [Figure(section="one", name="mean", value=1.0), {"ratio": math.nan}]}
    assert without_value(figures) == "rounds[1].ratio"
    assert without_value({"rounds": [1.0, "nan", None]}) is None


def test_a_benchmark_whose_result_says_nothing_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])

    async def empty(_: object) -> float:
        return statistics.median([])

    for measure in (lambda _: {"gain": math.nan}, empty):
        with pytest.raises(SystemExit) as ended:
            bench(command("What it measures.", rounds=3), measure, lambda found: [str(found)])
        assert isinstance(ended.value.code, str)
        assert "\n" not in ended.value.code
    assert capsys.readouterr().out == ""


WAITS = """
import asyncio
from benchmarks.harness.command import bench, command

async def measure(options):
    try:
        print("measures", flush=True)
        await asyncio.Event().wait()
    finally:
        print("its mesh is gone", flush=True)

bench(command("What it measures."), measure, str)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_benchmark_in_the_background_takes_its_mesh_along(number: signal.Signals) -> None:
    def as_in_the_background() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    program = [sys.executable, "-c", WAITS]
    with subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=as_in_the_background,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "measures\n"
        process.send_signal(number)
        assert process.stdout.read() == "its mesh is gone\n"
        assert process.stderr.read() == "interrupted\n"
    assert process.returncode == 1


@pytest.mark.parametrize("wrong", ["0", "-1", "1.5", "nan"])
def test_counts_are_one_or_more(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", wrong])
    with pytest.raises(SystemExit):
        command("What it measures.", rounds=3, kills=(1, "none is allowed", 0)).parse_args()
    assert "argument --rounds" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setattr(sys, "argv", ["bench", "--kills", "0"])
    assert command("What it measures.", kills=(1, "none is allowed", 0)).parse_args().kills == 0


# --- data of another period --------------------------------------------------------------------------------
def events(days: list[tuple[float, float]], nodes: int = 4) -> list[dict[str, object]]:
    kind = {"Level": "L1", "Class": "GPU", "Desc": "lost"}
    return [
        {"node_id": f"n{at % nodes}", "event_time": day, "event_type": what, "fault_type": kind}
        for at, pair in enumerate(days)
        for day, what in zip(pair, ("fault_start", "fault_end"), strict=True)
    ]


PERIODS = {
    "none": [],
    "one day": events([(0.0, 0.1)]),
    "a week": events([(day / 10, day / 10 + 0.01) for day in range(70)]),
    "all in the first month": events([(day / 10, day / 10 + 0.01) for day in range(300)])
    + events([(400.0, 400.1)]),
}


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("section", ["health", "outages"])
def test_a_log_of_another_period_meets_no_bar(
    section: str,
    period: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("benchmarks.policy_sections.outages.SEEDS", 1)
    monkeypatch.setattr("benchmarks.policy_sections.outages.DRAWN", 20)
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(json.dumps(PERIODS[period]).encode()))
    sheet = Sheet[Row](tmp_path / "out.json")
    assert not run_sections([section], SECTIONS, Bench(data=tmp_path, seed=0, sheet=sheet))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.match(rf"{section}: .*{re.escape(FILE.name)}", lines[0]), lines
    logged = [figure for figure in sheet.figures if "calibration" in figure.name or "AUROC" in figure.name]
    assert not logged


@pytest.mark.parametrize("section", ["cuts", "instances"])
def test_a_folder_without_models_meets_no_bar_of_the_planner(
    section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet = Sheet[Row](tmp_path / "out.json")
    assert not run_sections([section], PLANNER, Bench(data=tmp_path, seed=0, sheet=sheet))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{section}: {tmp_path}/models/")
    assert sheet.summary == "no figure was measured"


def test_a_folder_without_traces_meets_no_bar_of_the_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = tmp_path / "jobs" / "gavel_msr_seed0"
    monkeypatch.setattr(sys, "argv", ["bench", "--data", str(tmp_path), "--out", str(tmp_path / "out.json")])
    for content, refusal in ((None, "no such file"), ("", "no column submit_s, slots, run_s")):
        if content is not None:
            traces.mkdir(parents=True)
            (traces / "11cb48.trace").write_text(content)
        with pytest.raises(SystemExit) as ended:
            job_queue.main()
        line = str(ended.value.code)
        assert line.startswith(f"{traces}/11cb48.trace")
        assert refusal in line
        assert line.endswith("; --data names the folder that has jobs/")
        assert "\n" not in line
        assert "met" not in capsys.readouterr().out


def test_a_package_that_is_missing_is_told_in_a_line_and_nothing_is_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "benchmarks.policy_sections.optimum", raising=False)
    monkeypatch.delitem(sys.modules, SECTIONS["splits"], raising=False)
    sheet = Sheet[Row](tmp_path / "out.json")
    assert not run_sections(["splits"], SECTIONS, Bench(data=tmp_path, seed=0, sheet=sheet))
    remedy = "splits: scipy is not installed: pip install 'dmsc[bench-policies]'"
    assert capsys.readouterr().err.splitlines() == [remedy]
    assert sheet.summary == "no figure was measured"


def test_the_exit_code_says_it(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(json.dumps(PERIODS["all in the first month"]).encode()))
    run = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.built_in_policies", "--data", str(tmp_path)),
            *("--only", "health", "--out", str(tmp_path / "out.json")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "met" not in run.stdout
