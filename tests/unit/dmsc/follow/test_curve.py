"""The curve on disk: one line per step, also after a roll-back, and the same again on a replay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dmsc.follow.curve import RunCurve
from schemas.job import JobEvent
from tests.builders import job_events as events

ROOT = Path(__file__).resolve().parents[4]


def losses(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def test_one_line_per_step_and_a_tensorboard_file(tmp_path: Path) -> None:
    validation = JobEvent(job=events.JOB, kind="validation", at=9.0, validation_step=2, validation_loss=3.5)
    with RunCurve(tmp_path) as curve:
        curve.add(events.step(0, 4.0))  # before the board is open
        curve.open_board()
        curve.add(events.step(1, 3.0))
        curve.add(validation)
    assert losses(tmp_path) == [(0, 4.0), (1, 3.0)]
    (line,) = (tmp_path / "validation.jsonl").read_text().splitlines()
    assert json.loads(line) == {"at": 9.0, "step": 2, "validation_loss": 3.5}
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(point.step, point.value) for point in board.Scalars("train/loss")] == [(0, 4.0), (1, 3.0)]
    assert [point.value for point in board.Scalars("validation/loss")] == [3.5]


def test_a_roll_back_is_rewritten(tmp_path: Path) -> None:
    with RunCurve(tmp_path) as curve:
        curve.open_board()
        for event in (events.step(0, 4.0), events.step(1, 3.0), events.step(2, 2.0), events.step(1, 2.9)):
            curve.add(event)
        assert losses(tmp_path) == [(0, 4.0), (1, 2.9)]
        curve.add(events.step(2, 1.9))
    assert losses(tmp_path) == [(0, 4.0), (1, 2.9), (2, 1.9)]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [0, 1, 2]


def test_a_replay_starts_over(tmp_path: Path) -> None:
    for _ in range(2):
        with RunCurve(tmp_path) as curve:
            curve.add(events.step(0, 4.0))
    assert losses(tmp_path) == [(0, 4.0)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


WRITE = """
import sys
from pathlib import Path
from dmsc.follow.curve import RunCurve
with RunCurve(Path(sys.argv[1])) as curve:
    curve.open_board()
print("torch" in sys.modules)
"""


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
