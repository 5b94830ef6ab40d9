"""Pictures of forecasts: what is drawn, from a record made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bus import subjects
from dmsc.commands.policies.policy_versions import plot_forecast
from dmsc.console.option_groups import BusOptions
from dmsc.plots import save
from dmsc.plots.forecast import draw_forecasts, link_courses
from schemas.errors import BadInput
from schemas.job import JobState
from schemas.telemetry import LinkFigures, LinkSample
from tests.builders import recorded_runs
from tests.builders.telemetry import sample

SEED = 4


def record(steps: int):
    """Two links whose transfer times wander up and down, a sample every five seconds."""
    print("seed", SEED)
    noise = np.random.default_rng(SEED)
    for step in range(steps):
        times = (10 + 4 * np.sin(step / 9) + noise.normal(0, 0.3), 20 + 6 * np.cos(step / 9))
        links = [
            LinkSample(peer=f"j-s1-r{at}", figures=LinkFigures(transfer_ms=ms)) for at, ms in enumerate(times)
        ]
        yield sample("j-s0-r0", links=tuple(links)), 5.0 * step


def test_forecasts_stand_at_the_moment_that_they_are_for() -> None:
    found = link_courses("j", record(120))
    assert list(found) == [("j-s0-r0", "j-s1-r0"), ("j-s0-r0", "j-s1-r1")]
    course = found["j-s0-r0", "j-s1-r1"]
    assert [then - now for now, then in zip(course.at, course.forecast_at, strict=True)] == [10.0] * len(
        course.at
    )
    came = np.interp(course.forecast_at, course.at, course.value)[:-2]
    last, expected = np.array(course.value[:-2]), np.array(course.expected[:-2])
    assert np.abs(expected - came).mean() < np.abs(last - came).mean()
    assert link_courses("other", record(120)) == {}


def test_a_picture_of_forecasts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    courses = {f"{a} → {b}": course for (a, b), course in link_courses("j", record(120)).items()}
    for name in ("one.png", "two.png"):
        save(draw_forecasts("links", courses, unit="ms", coverage="90%"), tmp_path / name)
    assert (tmp_path / "one.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def written(path: Path, steps: int) -> Path:
    """A run's file with those samples."""
    measured = [
        recorded_runs.frame(subjects.INSTANCE_SAMPLE, at + 1, told, f"l{at}", job="j", sid=told.sid)
        for told, at in record(steps)
    ]
    ends = [recorded_runs.event(0.1, JobState.RUNNING), recorded_runs.event(5.0 * steps + 2, JobState.DONE)]
    recorded_runs.write(path, [ends[0], *measured, ends[1]])
    return path


def test_a_recorded_run_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    run = written(tmp_path / "run.dmscrun", 120)
    plot_forecast(str(run), tmp_path / "forecast.png", BusOptions(state=tmp_path))
    assert (tmp_path / "forecast.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "2 links" in capsys.readouterr().out


def test_a_run_that_is_too_short_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    run = written(tmp_path / "run.dmscrun", 20)
    with pytest.raises(BadInput, match="six minutes of measured links"):
        plot_forecast(str(run), tmp_path / "forecast.png", BusOptions(state=tmp_path))
