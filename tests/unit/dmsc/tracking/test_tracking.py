"""Figures for trackers, and a TensorBoard sink that is killed anywhere and has each figure of a step once."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from dmsc.process.composition import compose
from dmsc.process.run_options import RunOptions
from dmsc.state.settings import BusAddress
from dmsc.tracking.figures import PointFold, SinkPosition, SystemFigures, TrackedRun, tracked_run
from dmsc.tracking.sinks import sinks_of
from dmsc.tracking.tensorboard_sink import TensorBoardSink
from dmsc.tracking.tracker import SinkFeed, TrackerConfig
from schemas.errors import BadInput
from schemas.job import JobEvent, JobState
from schemas.telemetry import DeviceSample
from tests.builders.jobs import job, spec, state_event, step_event
from tests.builders.telemetry import sample

RUN = TrackedRun(job="j", name="tiny", submitted_at=5.0, parameters={"training.steps": "30"})


def validation(step: int, at: float) -> JobEvent:
    return JobEvent(job="j", kind="validation", at=at, validation_step=step, validation_loss=2.0)


def run_events(steps: int, *, back_at: int, back_to: int) -> list[JobEvent]:
    """A run of so many steps with a roll-back, validations, and an end."""
    order = [*range(back_at), *range(back_to, steps)]
    events: list[JobEvent] = [state_event(JobState.RUNNING)]
    for step in order:
        events.append(step_event(step, at=float(len(events)), loss=1.0 + step))
        if (step + 1) % 5 == 0:
            events.append(validation(step + 1, float(len(events))))
    return [*events, state_event(JobState.DONE, at=99.0)]


def test_points_of_a_jobs_events() -> None:
    fold = PointFold(SinkPosition())
    assert fold.take(1, state_event(JobState.RUNNING)) is None
    point = fold.take(3, step_event(0, loss=2.5), {"system/busy": 0.5})
    assert point is not None
    assert (point.step, point.metrics["train/loss"], point.metrics["system/busy"]) == (0, 2.5, 0.5)
    again = fold.take(4, step_event(0))
    assert again is not None
    assert again.rewound
    assert fold.take(4, step_event(1)) is None, "the sink has it"
    ended = fold.take(5, state_event(JobState.FAILED))
    assert ended is not None
    assert ended.ended is JobState.FAILED


def test_a_device_that_instances_share_counts_once() -> None:
    figures = SystemFigures()
    device = DeviceSample(device="cuda:0", power_w=300.0, utilization=0.5)
    for sid in ("j-s0-r0", "j-s1-r0"):
        figures.take(sample(sid, node="n", resident_bytes=10, device=device))
    told = figures.of("j")
    assert (told["system/power_w"], told["system/resident_bytes"]) == (300.0, 20.0)
    figures.forget("j")
    assert figures.of("j") == {}


def test_parameters_hide_what_records_hide() -> None:
    record = job(spec=spec(data={"source": "s3://name:word@lake/x"}))
    run = tracked_run("j", record)
    assert "word" not in run.parameters["data.source"]
    assert run.parameters["training.steps"] == "2"
    assert tracked_run("j", None, "recorded").parameters == {}


async def test_a_batch_of_more_jobs_than_may_be_open(tmp_path: Path) -> None:
    feed = SinkFeed(None, TensorBoardSink(tmp_path), SystemFigures(), TrackerConfig(open_jobs=2))
    names = [f"j{number}" for number in range(5)]
    await feed.take([(n, step_event(job=job)) for n, job in enumerate(names, start=1)])
    await feed.take([(9, step_event(1, job="j0")), (10, state_event(JobState.DONE, job="j0"))])
    await feed.close()
    for name, steps in {"j0": [0, 1], "j4": [0]}.items():
        shown = EventAccumulator(str(tmp_path / name))
        shown.Reload()
        assert [item.step for item in shown.Scalars("train/loss")] == steps


@pytest.mark.parametrize("seed", range(9))
def test_each_figure_of_a_step_is_there_once_however_often_the_sink_dies(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    print(f"seed {seed}")
    events = run_events(30, back_at=17, back_to=12)
    read_from, deaths = 0, 0
    while read_from < len(events):
        sink = TensorBoardSink(tmp_path)
        fold = PointFold(sink.begin(RUN))
        size = draw.randint(1, 9)
        for first in range(read_from, len(events), size):
            numbered = list(enumerate(events, start=1))[first : first + size]
            points = [point for pair in numbered if (point := fold.take(*pair)) is not None]
            torn = deaths < 10 and draw.random() < 0.6
            if torn:  # dies within the write: the note of the position is of before, the file is cut anywhere
                note = (tmp_path / "j" / "position.json").read_bytes()
                before = next((tmp_path / "j").glob("events*")).stat().st_size
                sink.write("j", points, fold.position)
                (tmp_path / "j" / "position.json").write_bytes(note)
                path = next((tmp_path / "j").glob("events*"))
                with path.open("r+b") as file:
                    file.truncate(draw.randint(before, path.stat().st_size))
                deaths += 1
                break
            sink.write("j", points, fold.position)
            read_from = first + size
    assert deaths > 0
    told = Counter((value.tag, event.step, event.wall_time) for event, value in summaries(tmp_path))
    assert set(told.values()) == {1}
    shown = EventAccumulator(str(tmp_path / "j"))
    shown.Reload()
    losses = [(item.step, item.value) for item in shown.Scalars("train/loss")]
    assert losses == [(step, 1.0 + step) for step in range(30)]
    assert [item.step for item in shown.Scalars("validation/loss")] == [5, 10, 15, 20, 25, 30]


def summaries(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Every value in the files, also those that TensorBoard would leave out after a roll-back."""
    for path in (folder / "j").glob("events*"):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                yield event, value


def test_a_sink_is_needed_and_a_missing_library_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match="tracker: say where to with --tensorboard DIR, --mlflow URI or --wandb"
    ):
        sinks_of(tensorboard=None, mlflow=None, wandb=False, state=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"--tensorboard .*; name a folder to write to"):
        sinks_of(tensorboard=tmp_path / "file", mlflow=None, wandb=False, state=tmp_path)


@pytest.mark.parametrize(
    ("option", "extra"), [({"mlflow": "http://127.0.0.1:1"}, "mlflow"), ({"wandb": True}, "wandb")]
)
def test_an_extra_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: dict[str, Any], extra: str
) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    options = RunOptions(state=tmp_path, **option)
    with pytest.raises(BadInput, match=rf"pip install 'dmsc\[{extra}\]'"):
        compose(["tracker"], options, BusAddress(servers=("nats://127.0.0.1:1",)))


def test_nothing_of_a_trackers_libraries_is_imported_unless_it_is_asked_for() -> None:
    code = (
        "import sys, dmsc.cli, dmsc.process.composition, dmsc.tracking.tracker, dmsc.tracking.sinks\n"
        "print([name for name in ('torch', 'mlflow', 'wandb', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
