"""Draws throughput over virtual time as SVG: a curve per job, and marks for the scenario's events."""

from __future__ import annotations

from dmsc.plots.svg_chart import Chart, ChartMark, Curve, levels, nice, rate_chart
from dmsc.simulation.results.report import JobReport, SimulationReport

_colours = ("#222", "#1f77b4", "#ff7f0e", "#9467bd", "#17a2b8", "#7a8b00", "#c2529b", "#8c564b")
_marks = {"slow": "#ff7f0e", "kill": "#d62728", "join": "#2ca02c", "link": "#1f77b4"}
MOST_CURVES = len(_colours)
"""If there are more jobs than this, one curve shows their sum."""


def svg(report: SimulationReport) -> str:
    """The SVG: microbatches/s over seconds."""
    curves = {job.job: _points(job) for job in report.jobs if job.curve}
    if len(curves) > MOST_CURVES:
        curves = {f"{len(curves)} jobs together": _together(list(curves.values()))}
    values = [value for points in curves.values() for _, value in points]
    span_s = max(report.simulated_s, 1e-9)
    chart = Chart(0.0, span_s, nice(max(values, default=0.0)), "microbatches/s")
    return rate_chart(
        f"{report.name}, seed {report.seed}: {report.instances} instances, {report.algorithm}",
        chart,
        [Curve(name, colour, curves[name]) for name, colour in zip(curves, _colours, strict=False)],
        [ChartMark(event.at_s, event.kind, event.text, _marks[event.kind]) for event in report.happened],
    )


def _points(job: JobReport) -> list[tuple[float, float]]:
    return levels(((ended_s - took_s, ended_s) for ended_s, took_s in job.curve), job.microbatches)


def _together(curves: list[list[tuple[float, float]]], columns: int = 200) -> list[tuple[float, float]]:
    """The sum of several curves of levels, sampled at equal distances."""
    end = max(points[-1][0] for points in curves)
    sums = []
    places = [0] * len(curves)
    for column in range(columns + 1):
        at = end * column / columns
        total = 0.0
        for index, points in enumerate(curves):
            while places[index] < len(points) and points[places[index]][0] < at:
                places[index] += 1
            if places[index] < len(points) and points[0][0] <= at:
                total += points[places[index]][1]
        sums.append((at, total))
    return sums
