"""Draws forecasts with their intervals and the values that were measured later, one panel per series."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dmsc.plots import new_figure
from policies.built_in.link_trend import LinkTrend
from policies.numerics.link_history import Link, LinkHistory
from schemas.telemetry import InstanceSample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = 6
"""The maximal number of series in one plot; the most uncertain ones are drawn."""


@dataclass(kw_only=True, slots=True)
class Course:
    """One series and its forecasts. `forecast_at` has the times for which forecasts were made."""

    at: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    forecast_at: list[float] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    @property
    def widest(self) -> float:
        return max((high - low for low, high in zip(self.low, self.high, strict=True)), default=0.0)


def link_courses(
    job: str, samples: Iterable[tuple[InstanceSample, float]], policy: LinkTrend | None = None
) -> dict[Link, Course]:
    """Compute what `link-trend` forecasts in a recorded run, every `LinkHistory.step_s`.

    Args:
        job: The job whose links are forecast.
        samples: The samples, each with the time when it was received (seconds), in order.
        policy: A policy with another configuration than the default.
    """
    policy = policy or LinkTrend()
    ahead = policy.config.ahead_steps * LinkHistory.step_s
    courses: dict[Link, Course] = {}
    due: float | None = None
    for sample, at in samples:
        while due is not None and at >= due:
            for forecast in policy.forecast(job, due):
                course = courses.setdefault(forecast.link, Course())
                course.at.append(due)
                course.value.append(forecast.now_ms)
                course.forecast_at.append(due + ahead)
                course.expected.append(forecast.expected_ms)
                course.low.append(forecast.low_ms)
                course.high.append(forecast.high_ms)
            due += LinkHistory.step_s
        due = due or at + LinkHistory.step_s
        policy.on_instance_sample(sample, at)
    return courses


def draw_forecasts(
    title: str, courses: Mapping[str, Course], *, unit: str, coverage: str, x_unit: str = "seconds"
) -> Figure:
    """Draw the forecasts of several series.

    Args:
        title: The title of the plot.
        courses: The series by name, at least one with a forecast; at most `PANELS` of them are drawn.
        unit: The unit of the values.
        coverage: The coverage of the intervals, e.g. `90 %`.
        x_unit: The unit of the times.
    """
    shown = sorted(courses.items(), key=lambda item: -item[1].widest)[:PANELS]
    figure = new_figure(9.0, 1.2 + 1.6 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    began = min(course.at[0] for _, course in shown)
    for axes, (name, course) in zip(panels, shown, strict=True):
        ahead = [at - began for at in course.forecast_at]
        axes.fill_between(ahead, course.low, course.high, color="C0", alpha=0.2, label=f"{coverage} interval")
        axes.plot(ahead, course.expected, color="C0", label="forecast")
        axes.plot(
            [at - began for at in course.at], course.value, color="0.2", linewidth=0.9, label="measured"
        )
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_ylabel(unit)
    panels[0].legend(loc="upper left", ncols=3, fontsize=8)
    panels[-1].set_xlabel(x_unit)
    figure.suptitle(title)
    return figure
