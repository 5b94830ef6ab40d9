"""What others have written steers no terminal: names, reasons and errors are shown as what they are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from dmsc.commands.mesh.up import _show
from dmsc.console.options import print_table, print_text
from dmsc.console.running import report
from dmsc.follow.live_view import LiveView, PlainView, draw
from dmsc.follow.run_state import RunState
from dmsc.launch.starting_view import StartingView
from dmsc.state.state_folder import MeshFile, StateFolder
from schemas.errors import DmscError, NotFound
from schemas.job import JobEvent, JobState
from tests.builders import job_events as events

HOSTILE = "\x1b[2J\x07[red]x[/b][link=http://a]\u202e"
SHOWN = r"\x1b[2J\x07[red]x[/b][link=http://a]\u202e"


def check(said: str) -> None:
    """It is there in full, and nothing of it did anything."""
    assert SHOWN in said.replace("\n", ""), said
    assert all(char.isprintable() for char in said.replace("\n", "")), said


def test_the_live_view() -> None:
    record = events.record().model_copy(update={"state": JobState.FAILED, "reason": HOSTILE})
    run = RunState.of(record)
    run.apply(JobEvent(job=events.JOB, kind="fault", at=1.0, text=HOSTILE))
    out = io.StringIO()
    Console(file=out, width=400).print(draw(run, 3.0))
    check(out.getvalue().splitlines()[0])
    check(out.getvalue().splitlines()[-1])
    said = [io.StringIO(), io.StringIO()]
    PlainView(said[0]).say(HOSTILE)
    LiveView(Console(file=said[1], width=400)).say(HOSTILE)
    for one in said:
        check(one.getvalue())


def test_tables_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a",), [(HOSTILE,)], title=f"t {HOSTILE}")
    table = capsys.readouterr().out
    assert table.replace("\n", "").count(SHOWN) == 2, table
    check(table)
    print_text(HOSTILE)
    print_text(HOSTILE, error=True)
    StartingView().say(HOSTILE)
    said = capsys.readouterr()
    check(said.out)
    assert said.err.count(SHOWN) == 2
    check(said.err)


@pytest.mark.parametrize("error", [NotFound(HOSTILE), DmscError(HOSTILE), RuntimeError(HOSTILE)])
def test_errors(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    report(error)
    check(capsys.readouterr().err)


@pytest.mark.parametrize("name", ["[red]", "a[/b]"])
def test_a_mesh_whose_folder_is_called_like_markup(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = StateFolder(tmp_path / name)
    mesh = MeshFile(servers=("nats://127.0.0.1:1",), pid=1, started_at=0.0, ready_at=1.0, sandbox=HOSTILE)
    _show(folder, mesh, False, detached=True)
    said = capsys.readouterr().out
    check(said)
    assert f"state{folder.path}sandbox" in "".join(said.split())
