"""Throughput over time with the faults marked: as an SVG file, and as a line of blocks for the terminal.

An SVG is a few lines of text: no plotting library is needed for one, and every browser shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from dmsc.chaos.plan import FaultKind
from dmsc.chaos.report import Report

Scale = Callable[[float], float]
"""A value to its place in the picture."""

_blocks = " ▁▂▃▄▅▆▇█"
_width, _height = 960, 360
_left, _right, _top, _bottom = 64, 16, 56, 44
_colours = {
    FaultKind.INSTANCE: "#d62728",
    FaultKind.FREEZE: "#1f77b4",
    FaultKind.STAGE: "#8c1a1a",
    FaultKind.CLUSTER: "#9467bd",
    FaultKind.ORCHESTRATOR: "#ff7f0e",
    FaultKind.SERVER: "#2b2b2b",
    FaultKind.GATEWAY: "#17a2b8",
    FaultKind.ROUTER: "#7a8b00",
    FaultKind.REGISTRY: "#c2529b",
}


def rates(report: Report, columns: int) -> list[float]:
    """Samples/s in equal slices of the run: each step's samples are spread over the time that it took."""
    if not report.advances or columns < 1:
        return []
    began, ended = report.advances[0].began, report.advances[-1].ended
    slice_s = (ended - began) / columns
    if slice_s <= 0:
        return []
    found = [0.0] * columns
    for one in report.advances:
        if one.seconds <= 0:
            continue
        rate = report.samples_per_step / one.seconds
        first, last = (one.began - began) / slice_s, (one.ended - began) / slice_s
        for column in range(int(first), min(math.ceil(last), columns)):
            found[column] += rate * (min(last, column + 1) - max(first, column))
    return found


def lines(report: Report, width: int = 72) -> list[str]:
    """Two lines for a terminal: throughput from 0 up, and the faults below as their kinds' first letters."""
    values = rates(report, width)
    if not values:
        return []
    top = max(*values, report.clean.steps_per_s * report.samples_per_step)
    drawn = "".join(
        _blocks[min(round(value / top * (len(_blocks) - 1)), len(_blocks) - 1)] for value in values
    )
    began, ended = report.advances[0].began, report.advances[-1].ended
    marks = [" "] * width
    for fault in report.faults:
        place = (fault.at - began) / (ended - began)
        if fault.fired and 0 <= place <= 1:
            marks[min(int(place * width), width - 1)] = fault.kind.value[0]
    return [drawn, "".join(marks)]


def svg(report: Report) -> str:
    """The picture: samples/s over seconds, the clean run's rate dashed, a line per fault with its victim."""
    began = report.advances[0].began if report.advances else 0.0
    span_s = max(report.advances[-1].ended - began if report.advances else 0.0, 1e-9)
    clean = report.clean.steps_per_s * report.samples_per_step
    highest = max(
        (report.samples_per_step / one.seconds for one in report.advances if one.seconds > 0), default=0.0
    )
    top = _nice(min(max(highest, clean), 2 * clean) if clean else highest)

    def x(at: float) -> float:
        return _left + (at - began) / span_s * (_width - _left - _right)

    def y(rate: float) -> float:
        return _height - _bottom - min(rate, top) / top * (_height - _top - _bottom)

    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_width} {_height}" width="{_width}"'
            f' height="{_height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_width}" height="{_height}" fill="white"/>',
            f'<text x="{_left}" y="20" font-size="14">{escape(_title(report))}</text>',
            *_axes(span_s, top, x, y, began),
            f'<line x1="{_left}" x2="{_width - _right}" y1="{y(clean):.1f}" y2="{y(clean):.1f}"'
            ' stroke="#2ca02c" stroke-dasharray="6 4"><title>clean run</title></line>',
            *_marks(report, x),
            *_curve(report, x, y),
            *_legend(report),
            "</svg>",
            "",
        ]
    )


def _title(report: Report) -> str:
    goodput = "" if report.goodput is None else f", goodput {report.goodput:.2f}"
    fired = sum(fault.fired for fault in report.faults)
    same = {True: ", same weights", False: ", OTHER WEIGHTS", None: ""}[report.hash_equal]
    return f"{report.job}: {fired} faults{goodput}{same}"


def _axes(span_s: float, top: float, x: Scale, y: Scale, began: float) -> list[str]:
    found = []
    for index in range(5):
        rate = top * index / 4
        found.append(
            f'<line x1="{_left}" x2="{_width - _right}" y1="{y(rate):.1f}" y2="{y(rate):.1f}" stroke="#ddd"/>'
            f'<text x="{_left - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.3g}</text>'
        )
    step_s = _nice(span_s / 8)
    for index in range(int(span_s / step_s) + 1):
        place = x(began + index * step_s)
        found.append(
            f'<text x="{place:.1f}" y="{_height - _bottom + 16}" text-anchor="middle">'
            f"{index * step_s:g}</text>"
        )
    found.append(f'<text x="{_width - _right}" y="{_height - 8}" text-anchor="end">seconds</text>')
    found.append(f'<text x="6" y="{_top - 10}">samples/s</text>')
    return found


def _marks(report: Report, x: Scale) -> list[str]:
    return [
        f'<line x1="{x(fault.at):.1f}" x2="{x(fault.at):.1f}" y1="{_top}" y2="{_height - _bottom}"'
        f' stroke="{_colours[fault.kind]}" stroke-width="1.5"><title>{escape(fault.victim)}</title></line>'
        for fault in report.faults
        if fault.fired
        and report.advances
        and report.advances[0].began <= fault.at <= report.advances[-1].ended
    ]


def _curve(report: Report, x: Scale, y: Scale) -> list[str]:
    points = []
    for one in report.advances:
        rate = report.samples_per_step / one.seconds if one.seconds > 0 else 0.0
        points += [f"{x(one.began):.1f},{y(rate):.1f}", f"{x(one.ended):.1f},{y(rate):.1f}"]
    return [f'<polyline points="{" ".join(points)}" fill="none" stroke="#222" stroke-width="1.5"/>']


def _legend(report: Report) -> list[str]:
    place, found = float(_left), []
    entries = [("clean run", "#2ca02c")]
    entries += [(kind.value, _colours[kind]) for kind in _kinds(report)]
    for name, colour in entries:
        found.append(
            f'<rect x="{place:.0f}" y="30" width="10" height="10" fill="{colour}"/>'
            f'<text x="{place + 14:.0f}" y="39">{name}</text>'
        )
        place += 30 + 7.5 * len(name)
    return found


def _kinds(report: Report) -> Sequence[FaultKind]:
    return tuple(dict.fromkeys(fault.kind for fault in report.faults if fault.fired))


def _nice(value: float) -> float:
    """The next of 1, 2, 2.5, 5 × 10ⁿ at or above."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * (1 - 1e-9))
