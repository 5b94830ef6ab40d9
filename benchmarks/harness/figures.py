"""Spreads and percentiles; figures beside their bars, and a sheet that keeps them in a file."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, TypeVar

from benchmarks.harness.emptiness import NothingMeasured, some


def spread(values: Sequence[float], form: str = ".2f", unit: str = "", *, scale: float = 1.0) -> str:
    """The median and the range, e.g. `1.02 s (0.98–1.10)`; each value × `scale`.

    Raises:
        NothingMeasured: There is no value.
    """
    some(values, "values")
    low, middle, high = (scale * value for value in (min(values), statistics.median(values), max(values)))
    return f"{middle:{form}}{unit} ({low:{form}}–{high:{form}})"


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of the values are.

    Raises:
        NothingMeasured: There is no value.
    """
    some(values, "values")
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


class Rates:
    """Rates of sides that had their turns in rounds: ratios by round, so that a machine's mood cancels."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = defaultdict(list)

    def __contains__(self, side: str) -> bool:
        return bool(self._found.get(side))

    def add(self, side: str, rate: float) -> None:
        self._found[side].append(rate)

    def ratio(self, one: str, other: str) -> float:
        """The median over rounds of one ÷ the other.

        Raises:
            NothingMeasured: One of them had no turn.
        """
        pairs = list(zip(some(self._found[one], one), some(self._found[other], other), strict=True))
        return statistics.median(mine / its for mine, its in pairs)

    def note(self, one: str, other: str, unit: str) -> str:
        mine, its = (statistics.median(self._found[side]) for side in (one, other))
        return f"{mine:.1f} and {its:.1f} {unit}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of a result. `kept` None: there is no bar, or it was not measured.

    Raises:
        NothingMeasured: The value is not a number: what it is counted over is empty.
    """

    section: str
    name: str
    value: float | None
    unit: str = ""
    bar: str = ""
    kept: bool | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.value is not None and not math.isfinite(self.value):
            raise NothingMeasured(f"{self.value}", f"the figure {self.name!r}", "part of the data is empty")

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: ""}[self.kept]


F = TypeVar("F", bound=Figure)


def at_most(value: float | None, bar: float) -> tuple[str, bool]:
    """A bar and whether it is kept; it is missed where there is no value, because none could be measured."""
    return f"≤ {bar:g}", value is not None and bool(value <= bar)


def at_least(value: float | None, bar: float) -> tuple[str, bool]:
    """Likewise."""
    return f"≥ {bar:g}", value is not None and bool(value >= bar)


class Sheet(Generic[F]):
    """All figures so far, in a file that is written anew after each addition: nothing later can lose them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.figures: list[F] = []

    def add(self, *figures: F) -> None:
        self.figures.extend(figures)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        body = json.dumps([asdict(figure) for figure in self.figures], indent=2, ensure_ascii=False)
        self._file.write_text(body + "\n", encoding="utf-8")

    @property
    def summary(self) -> str:
        """How many of how many missed their bar, and where they are."""
        if not self.figures:
            return "no figure was measured"
        return f"{self.missed} of {len(self.figures)} missed; written to {self._file}"

    @property
    def missed(self) -> int:
        return sum(figure.kept is False for figure in self.figures)
