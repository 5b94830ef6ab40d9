"""`dmsc policy train` on an exported run: the trained state as a file, and refusals of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bus import subjects
from dmsc.cli import app
from schemas.learnt_state import read_trained
from tests.builders import recorded_runs
from tests.builders.telemetry import sample


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A job of one instance that falls silent for five seconds, forty times."""
    told = [
        recorded_runs.frame(
            subjects.INSTANCE_SAMPLE, 5.0 * at, sample("j-s0-r0", step=at), f"s{at}", job="j", sid="j-s0-r0"
        )
        for at in range(60)
    ]
    path = tmp_path / "silences.dmscrun"
    recorded_runs.write(path, told)
    return path


def dmsc(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output, without a mesh."""
    done = CliRunner().invoke(app, ["policy", "train", *arguments, "--state", str(tmp_path / "none")])
    return done.exit_code, done.output if done.exception is None else f"{done.output}{done.exception}"


def test_a_state_is_trained_from_a_run_and_written_to_a_file(tmp_path: Path, run: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        code, output = dmsc(tmp_path, str(run), "--module", "transience", "--out", str(file), "--json")
        assert code == 0, output
    [row] = json.loads(output)
    assert (row["module"], row["unit"], row["about"]) == ("transience", "cost ÷ least cost", "better")
    assert row["loss"] == 1.0 < row["loss_now"]
    one, two = (read_trained(file.read_bytes()) for file in files)
    assert (one.data, one.digest) == (two.data, row["digest"])
    assert one.reason.startswith("trained on ")


def test_without_a_module_those_that_learn_nothing_say_why(tmp_path: Path, run: Path) -> None:
    code, output = dmsc(tmp_path, str(run), "--json")
    assert code == 0, output
    about = {row["module"]: row["about"] for row in json.loads(output)}
    assert about["transience"] == "better"
    assert about["device-risk"].startswith("device-risk: 0 signs of devices to learn from")


def test_records_that_teach_nobody_are_an_error_after_the_reasons(tmp_path: Path) -> None:
    path = tmp_path / "short.dmscrun"
    recorded_runs.write(path, recorded_runs.frames(5))
    code, output = dmsc(tmp_path, str(path))
    assert code != 0
    assert "transience: 0 outages to learn from and 0 held out" in " ".join(output.split())
    assert "no module was trained: the records hold too little for each" in output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["none.dmscrun"], "none.dmscrun: No such file or directory"),
        (
            ["RUN", "--module", "link-trend"],
            "link-trend can't be trained from records; there are: device-risk",
        ),
        (["RUN", "--out", "x.json"], "--out takes the state of one module: name it with --module"),
        (["RUN", "--module", "device-risk"], "device-risk: 0 signs of devices to learn from and 0 held out"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, run: Path, arguments: list[str], reason: str) -> None:
    code, output = dmsc(tmp_path, *(str(run) if one == "RUN" else one for one in arguments))
    assert code != 0
    assert reason in output
