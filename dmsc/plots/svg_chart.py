"""Draws a rate over time as SVG: axes, curves, marks, a legend.

An SVG is a few lines of text, so it needs no plotting library, and every browser shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 960, 360
_left, _right, _top, _bottom = 64, 16, 56, 44


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. Its x axis shows `span_s` seconds from `began`; its y axis shows 0 to `top` in `unit`."""

    began: float
    span_s: float
    top: float
    unit: str

    def x(self, at: float) -> float:
        return _left + (at - self.began) / self.span_s * (WIDTH - _left - _right)

    def y(self, value: float) -> float:
        return HEIGHT - _bottom - min(value, self.top) / self.top * (HEIGHT - _top - _bottom)

    def draw(self, title: str, parts: Iterable[str]) -> str:
        """Return the whole SVG document."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
                f' height="{HEIGHT}" font-family="sans-serif" font-size="12">',
                f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
                f'<text x="{_left}" y="20" font-size="14">{escape(title)}</text>',
                *self._axes(),
                *parts,
                "</svg>",
                "",
            ]
        )

    def curve(self, points: Iterable[tuple[float, float]], colour: str = "#222") -> str:
        """A line through points (seconds, value)."""
        coordinates = " ".join(f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in points)
        return f'<polyline points="{coordinates}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    def mark(self, at: float, colour: str, text: str) -> str:
        """A vertical line at a time, with a text that says what happened."""
        return (
            f'<line x1="{self.x(at):.1f}" x2="{self.x(at):.1f}" y1="{_top}" y2="{HEIGHT - _bottom}"'
            f' stroke="{colour}" stroke-width="1.5"><title>{escape(text)}</title></line>'
        )

    def level(self, value: float, colour: str, text: str) -> str:
        """A dashed horizontal line at a value, with a text."""
        return (
            f'<line x1="{_left}" x2="{WIDTH - _right}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}"'
            f' stroke="{colour}" stroke-dasharray="6 4"><title>{escape(text)}</title></line>'
        )

    def legend(self, entries: Sequence[tuple[str, str]]) -> list[str]:
        """A row of (name, colour) above the chart."""
        place, parts = float(_left), []
        for name, colour in entries:
            parts.append(
                f'<rect x="{place:.0f}" y="30" width="10" height="10" fill="{colour}"/>'
                f'<text x="{place + 14:.0f}" y="39">{escape(name)}</text>'
            )
            place += 30 + 7.5 * len(name)
        return parts

    def _axes(self) -> list[str]:
        parts = []
        for index in range(5):
            value = self.top * index / 4
            y = self.y(value)
            parts.append(
                f'<line x1="{_left}" x2="{WIDTH - _right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                f'<text x="{_left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
            )
        step_s = nice(self.span_s / 8)
        for index in range(int(self.span_s / step_s) + 1):
            place = self.x(self.began + index * step_s)
            parts.append(
                f'<text x="{place:.1f}" y="{HEIGHT - _bottom + 16}" text-anchor="middle">'
                f"{index * step_s:g}</text>"
            )
        parts.append(f'<text x="{WIDTH - _right}" y="{HEIGHT - 8}" text-anchor="end">seconds</text>')
        parts.append(f'<text x="6" y="{_top - 10}">{escape(self.unit)}</text>')
        return parts


@dataclass(frozen=True, slots=True)
class ChartMark:
    """Something that happened: its time, its kind for the legend, and a text."""

    at: float
    kind: str
    text: str
    colour: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A named curve: points (seconds, value)."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def levels(steps: Iterable[tuple[float, float]], amount: float) -> list[tuple[float, float]]:
    """The points of a rate: each step (begin, end) is a level, its `amount` divided by its time."""
    return [
        (at, amount / (ended - began) if ended > began else 0.0)
        for began, ended in steps
        for at in (began, ended)
    ]


def rate_chart(
    title: str,
    chart: Chart,
    curves: Sequence[Curve],
    marks: Sequence[ChartMark],
    level: tuple[float, str, str] | None = None,
) -> str:
    """The SVG of rates over time.

    Args:
        title: The title.
        chart: Its axes.
        curves: The rates. One without a name is not in the legend.
        marks: What happened meanwhile; each kind is in the legend once.
        level: A rate to compare with: value, name, colour.
    """
    names = [(level[1], level[2])] if level else []
    names += [(curve.name, curve.colour) for curve in curves if curve.name]
    names += dict.fromkeys((mark.kind, mark.colour) for mark in marks)
    return chart.draw(
        title,
        [
            *([chart.level(level[0], level[2], level[1])] if level else []),
            *(chart.mark(mark.at, mark.colour, mark.text) for mark in marks),
            *(chart.curve(curve.points, curve.colour) for curve in curves),
            *chart.legend(names),
        ],
    )


def nice(value: float) -> float:
    """The smallest of 1, 2, 2.5, 5 × 10ⁿ that is at least the value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value * (1 - 1e-9))
