"""Pictures of forecasts: what is drawn, from a record made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dmsc.plots import save
from dmsc.plots.forecast import draw_forecasts, link_courses
from schemas.telemetry import LinkFigures, LinkSample
from tests.unit.policies.builders import sample

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
        save(draw_forecasts("links", courses, unit="ms", coverage="90 %"), tmp_path / name)
    assert (tmp_path / "one.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
