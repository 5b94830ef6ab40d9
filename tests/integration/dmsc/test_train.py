"""`dmsc train` and `dmsc attach` against a stand-in gateway: what is shown, what is written, Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.dmsc.command_line import dmsc, running
from tests.integration.dmsc.stand_in_gateway import SHARD, TOKEN, StandIn, whole_run

JOB = "name: tiny\nmodel: {factory: 'a:b'}\ntraining: {steps: 2}\nparallel: {stages: 2}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my job").mkdir()
    (tmp_path / "my job" / "job.yaml").write_text(JOB)
    return tmp_path / "my job"


def test_a_whole_run_is_shown_and_written(folder: Path) -> None:
    with StandIn(whole_run()).serving() as url:
        done = dmsc("train", "job.yaml", cwd=folder, DMSC_GATEWAY=url, DMSC_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert "step 2/2  loss 3.0000" in done.stdout
    for expected in ("loss        4.0000 → 3.0000", "  │ def f(): pass", "sha256", "weights"):
        assert expected in done.stdout
    out = folder / "runs" / "tiny-j1"
    assert len((out / "curve.jsonl").read_text().splitlines()) == 2
    assert (out / "weights" / "s0.safetensors").read_bytes() == SHARD
    assert json.loads((out / "record.json").read_text())["state"] == "done"
    assert list((out / "tensorboard").iterdir())


def test_a_terminal_shows_how_long_instances_take(folder: Path) -> None:
    stand_in = StandIn(whole_run()[:-1], hold_open=True, load=(("j1-s0-r0", 41.6), ("j1-s1-r0", 0.0)))
    where = {"DMSC_TOKEN": TOKEN, "FORCE_COLOR": "1", "COLUMNS": "100"}
    with (
        stand_in.serving() as url,
        running("train", "job.yaml", cwd=folder, DMSC_GATEWAY=url, **where) as train,
    ):
        train.until("ms/microbatch")
        train.until(lambda text: " 42 " in text)
        train.interrupt()
        assert train.wait() == 130
    assert "GET /v1/jobs/j1/load" in stand_in.asked


def test_json_is_one_event_per_line_and_the_record_last(folder: Path) -> None:
    with StandIn(whole_run()).serving() as url:
        done = dmsc("train", "job.yaml", "--json", cwd=folder, DMSC_GATEWAY=url, DMSC_TOKEN=TOKEN)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("kind") for line in lines] == ["state", "instances", "step", "step", "state", None]
    assert lines[-1]["state"] == "done"


def test_a_detached_job_in_json_is_exactly_one_line(folder: Path) -> None:
    with StandIn(whole_run()).serving() as url:
        options = ("--detach", "--json")
        done = dmsc("train", "job.yaml", *options, cwd=folder, DMSC_GATEWAY=url, DMSC_TOKEN=TOKEN)
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["job"] == "j1"


@pytest.mark.parametrize("command", [("train", "job.yaml"), ("attach", "j1")])
def test_where_nothing_can_be_written_is_said_before_anything_is_asked(
    folder: Path, command: tuple[str, str]
) -> None:
    (folder / "taken").write_text("a file")
    stand_in = StandIn(whole_run())
    with stand_in.serving() as url:
        done = dmsc(*command, "--out", "taken/run", cwd=folder, DMSC_GATEWAY=url, DMSC_TOKEN=TOKEN)
    (line,) = done.stderr.splitlines()
    assert "--out taken/run: can't write in " in line
    assert line.endswith("taken: Not a directory; name another folder")
    assert done.returncode == 2
    assert not stand_in.asked


def test_attach_replays_from_the_start(folder: Path) -> None:
    stand_in = StandIn(whole_run())
    with stand_in.serving() as url:
        where = {"DMSC_GATEWAY": url, "DMSC_TOKEN": TOKEN}
        detached = dmsc("train", "job.yaml", "--detach", cwd=folder, **where)
        assert detached.returncode == 0
        assert "follow: dmsc attach j1" in detached.stdout
        assert not (folder / "runs").exists()
        for _ in range(2):
            attached = dmsc("attach", "j1", "--out", "here", cwd=folder, **where)
            assert attached.returncode == 0, attached.stderr
            assert len((folder / "here" / "curve.jsonl").read_text().splitlines()) == 2
    assert stand_in.starts == [1, 1]


def test_ctrl_c_cancels_the_job_that_train_started(folder: Path) -> None:
    stand_in = StandIn(whole_run()[:-1], hold_open=True)
    with (
        stand_in.serving() as url,
        running("train", "job.yaml", cwd=folder, DMSC_GATEWAY=url, DMSC_TOKEN=TOKEN) as train,
    ):
        train.until("step 2/2")
        train.interrupt()
        assert train.wait() == 130
        assert "cancelling the job; Ctrl-C again leaves at once" in train.output
        assert "j1 cancelled: " in train.output
        assert "Traceback" not in train.output
    assert "POST /v1/jobs/j1/cancel" in stand_in.asked


def test_ctrl_c_on_attach_only_detaches(folder: Path) -> None:
    stand_in = StandIn(whole_run()[:-1], hold_open=True)
    with (
        stand_in.serving() as url,
        running("attach", "j1", cwd=folder, DMSC_GATEWAY=url, DMSC_TOKEN=TOKEN) as attach,
    ):
        attach.until("step 2/2")
        attach.interrupt()
        assert attach.wait() == 130
        assert "j1 goes on; watch it again with: dmsc attach j1" in attach.output
        stand_in.cancelled.set()
    assert "POST /v1/jobs/j1/cancel" not in stand_in.asked


def test_a_failed_job_is_exit_code_1_and_its_reason(folder: Path) -> None:
    from schemas.job import JobState
    from tests.builders import job_events as events

    script = [*whole_run()[:-1], events.state(JobState.FAILED, "the model's layers do not fit")]
    with StandIn(script).serving() as url:
        done = dmsc("train", "job.yaml", cwd=folder, DMSC_GATEWAY=url, DMSC_TOKEN=TOKEN)
    assert done.returncode == 1
    assert "failed: the model's layers do not fit" in done.stdout


def test_a_wrong_token_is_exit_code_4(folder: Path) -> None:
    with StandIn(whole_run()).serving() as url:
        done = dmsc("train", "job.yaml", cwd=folder, DMSC_GATEWAY=url, DMSC_TOKEN="wrong")
    assert (done.returncode, done.stderr) == (4, "dmsc: unknown token\n")


def test_a_bad_file_is_refused_before_anything_is_asked(folder: Path) -> None:
    (folder / "bad.yaml").write_text(JOB.replace("steps: 2", "stepz: 2"))
    stand_in = StandIn(whole_run())
    with stand_in.serving() as url:
        done = dmsc("train", "bad.yaml", cwd=folder, DMSC_GATEWAY=url, DMSC_TOKEN=TOKEN)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "dmsc: bad.yaml:3: training.steps: missing; give a whole number ≥ 1",
        "dmsc: bad.yaml:3: training.stepz: unknown key; did you mean training.steps?",
    ]
    assert stand_in.asked == []
