"""Draws throughput over time and marks the faults: as an SVG file, and as block characters for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dmsc.chaos.plan import FaultKind
from dmsc.chaos.report import ChaosReport, InjectedFault
from dmsc.plots.svg_chart import Chart, ChartMark, Curve, levels, nice, rate_chart

_blocks = " ▁▂▃▄▅▆▇█"
_clean_colour = "#2ca02c"
_colours = {
    FaultKind.INSTANCE: "#d62728",
    FaultKind.DATA: "#ff9896",
    FaultKind.FREEZE: "#1f77b4",
    FaultKind.STAGE: "#8c1a1a",
    FaultKind.WHOLE_STAGE: "#e377c2",
    FaultKind.NOTICE: "#9acd32",
    FaultKind.CLUSTER: "#9467bd",
    FaultKind.ORCHESTRATOR: "#ff7f0e",
    FaultKind.SERVER: "#2b2b2b",
    FaultKind.SERVER_FREEZE: "#5a6fd0",
    FaultKind.NO_ROOM: "#a0522d",
    FaultKind.GATEWAY: "#17a2b8",
    FaultKind.ROUTER: "#7a8b00",
    FaultKind.REGISTRY: "#c2529b",
    FaultKind.ACCOUNTANT: "#4f8f6f",
    FaultKind.MODEL_REGISTRY: "#b58900",
    FaultKind.GARBAGE_VALUE: "#bcbd22",
    FaultKind.DISK_FULL: "#5b4636",
}
LETTERS = {kind: kind.value[0] for kind in FaultKind} | {
    FaultKind.DATA: "D",
    FaultKind.NOTICE: "n",
    FaultKind.NO_ROOM: "N",
    FaultKind.SERVER: "S",
    FaultKind.REGISTRY: "R",
    FaultKind.MODEL_REGISTRY: "M",
    FaultKind.GARBAGE_VALUE: "v",
    FaultKind.DISK_FULL: "d",
    FaultKind.SERVER_FREEZE: "F",
}
"""The letter of each kind, shown below the curve on a terminal."""


def rates(report: ChaosReport, columns: int) -> list[float]:
    """Samples/s in equal slices of the run. Each step's samples are spread evenly over the step's time."""
    if not report.advances or columns < 1:
        return []
    began, ended = report.advances[0].began, report.advances[-1].ended
    slice_s = (ended - began) / columns
    if slice_s <= 0:
        return []
    values = [0.0] * columns
    for advance in report.advances:
        if advance.seconds <= 0:
            continue
        rate = report.samples_per_step / advance.seconds
        first, last = (advance.began - began) / slice_s, (advance.ended - began) / slice_s
        for column in range(int(first), min(math.ceil(last), columns)):
            values[column] += rate * (min(last, column + 1) - max(first, column))
    return values


def lines(report: ChaosReport, width: int = 72) -> list[str]:
    """Two lines for a terminal: the throughput from 0 up, and below it the letters of faults."""
    values = rates(report, width)
    if not values:
        return []
    top = max(*values, report.clean.steps_per_s * report.samples_per_step)
    return drawn(values, top, report.faults, (report.advances[0].began, report.advances[-1].ended))


def drawn(
    values: Sequence[float], top: float, faults: Sequence[InjectedFault], span: tuple[float, float]
) -> list[str]:
    """Two lines for a terminal: `values` in equal slices of `span`, from 0 to `top`; letters of faults."""
    (began, ended), width = span, len(values)
    blocks = "".join(
        _blocks[min(round(value / top * (len(_blocks) - 1)), len(_blocks) - 1)] if top else " "
        for value in values
    )
    marks = [" "] * width
    for fault in faults:
        place = (fault.at - began) / (ended - began)
        if fault.fired and 0 <= place <= 1:
            marks[min(int(place * width), width - 1)] = LETTERS[fault.kind]
    return [blocks, "".join(marks)]


def svg(report: ChaosReport) -> str:
    """The SVG: samples/s over seconds, the clean run's rate as a dashed line, a labelled line per fault."""
    began = report.advances[0].began if report.advances else 0.0
    ended = report.advances[-1].ended if report.advances else began
    points = levels(((advance.began, advance.ended) for advance in report.advances), report.samples_per_step)
    clean = report.clean.steps_per_s * report.samples_per_step
    return drawn_svg(_title(report), points, (began, ended), report.faults, clean, "samples/s")


def drawn_svg(
    title: str,
    points: Sequence[tuple[float, float]],
    span: tuple[float, float],
    faults: Sequence[InjectedFault],
    clean: float,
    unit: str,
) -> str:
    """The SVG of a rate over the time `span`, beside that of the clean run; a labelled line per fault."""
    began, ended = span
    span_s = max(ended - began, 1e-9)
    highest = max((rate for _, rate in points), default=0.0)
    top = nice(min(max(highest, clean), 2 * clean) if clean else highest)
    inside = [fault for fault in faults if fault.fired and began <= fault.at <= began + span_s]
    return rate_chart(
        title,
        Chart(began, span_s, top, unit),
        [Curve("", "#222", list(points))],
        [ChartMark(fault.at, fault.kind.value, fault.victim, _colours[fault.kind]) for fault in inside],
        (clean, "clean run", _clean_colour),
    )


def _title(report: ChaosReport) -> str:
    goodput = "" if report.goodput is None else f", goodput {report.goodput:.2f}"
    fired = sum(fault.fired for fault in report.faults)
    same = {True: ", same weights", False: ", OTHER WEIGHTS", None: ""}[report.hash_equal]
    return f"{report.job}: {fired} faults{goodput}{same}"
