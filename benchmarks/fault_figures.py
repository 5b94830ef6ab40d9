"""Figures of `faults.py` beside their bars: a line each as soon as it is known, and JSON in the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the result.

    `kept` None: there is no bar, or it was not measured. `seed`: of the plan of faults, of which `fired`
    came about; None where there is none.
    """

    section: str
    name: str
    value: float | None
    unit: str = ""
    bar: str = ""
    kept: bool | None = None
    seed: int | None = None
    fired: int | None = None
    note: str = ""

    def __str__(self) -> str:
        mark = {True: "met", False: "MISSED", None: ""}[self.kept]
        value = "–" if self.value is None else f"{self.value:.2f}".rstrip("0").rstrip(".")
        plan = [f"seed {self.seed}"] if self.seed is not None else []
        plan += [f"{self.fired} faults fired"] if self.fired is not None else []
        told = "; ".join([*plan, *([self.note] if self.note else [])])
        return (
            f"{mark:6} {self.section:9} {self.name:38} {value:>7} {self.unit:6} {self.bar:7} {told}".rstrip()
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the figures of one disturbed run have in common."""

    section: str
    seed: int | None = None
    fired: int | None = None

    def at_most(self, name: str, value: float | None, unit: str, bar: float, note: str = "") -> Figure:
        """Missed where there is no value: what should have been measured was not."""
        return self._figure(name, value, unit, f"≤ {bar:g}", value is not None and value <= bar, note)

    def at_least(self, name: str, value: float | None, unit: str, bar: float, note: str = "") -> Figure:
        """Likewise."""
        return self._figure(name, value, unit, f"≥ {bar:g}", value is not None and value >= bar, note)

    def equal(self, name: str, value: bool, note: str = "") -> Figure:
        """Yes or no, which should be yes."""
        return self._figure(name, float(value), "", "= 1", value, note)

    def told(self, name: str, value: float | None, unit: str = "", note: str = "") -> Figure:
        """Without a bar."""
        return self._figure(name, value, unit, "", None, note)

    def _figure(
        self, name: str, value: float | None, unit: str, bar: str, kept: bool | None, note: str
    ) -> Figure:
        return Figure(
            section=self.section,
            name=name,
            value=value,
            unit=unit,
            bar=bar,
            kept=kept,
            seed=self.seed,
            fired=self.fired,
            note=note,
        )


class Sheet:
    """All figures so far. Each is printed, and the file written anew, so that what follows can't lose it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.figures: list[Figure] = []

    def add(self, *figures: Figure) -> None:
        for figure in figures:
            print(figure, flush=True)
        self.figures.extend(figures)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        body = json.dumps([asdict(figure) for figure in self.figures], indent=2, ensure_ascii=False)
        self._file.write_text(body + "\n", encoding="utf-8")

    def missed(self) -> Sequence[Figure]:
        return [figure for figure in self.figures if figure.kept is False]
