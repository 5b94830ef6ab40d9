"""Figures of benchmarks of sections (`fault_runs.py`) beside their bars, each told as soon as it is known."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.harness.figures import Figure, Sheet, at_least, at_most


@dataclass(frozen=True, kw_only=True)
class FaultFigure(Figure):
    """`seed`: of the plan of faults, of which `fired` came about; None where there is none."""

    seed: int | None = None
    fired: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fired == 0 and self.kept:
            raise NothingMeasured(f"no fault fired for the figure {self.name!r}", self.section)

    def __str__(self) -> str:
        value = "–" if self.value is None else f"{self.value:.2f}".rstrip("0").rstrip(".")
        plan = [f"seed {self.seed}"] if self.seed is not None else []
        plan += [f"{self.fired} faults fired"] if self.fired is not None else []
        notes = "; ".join([*plan, *([self.note] if self.note else [])])
        return (
            f"{self.verdict:6} {self.section:10} {self.name:38} {value:>7} {self.unit:6} {self.bar:7} {notes}"
        ).rstrip()


class FaultSheet(Sheet[FaultFigure]):
    """Prints each figure as it comes."""

    def add(self, *figures: FaultFigure) -> None:
        for figure in figures:
            print(figure, flush=True)
        super().add(*figures)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the figures of one disturbed run have in common."""

    section: str
    seed: int | None = None
    fired: int | None = None

    def at_most(self, name: str, value: float | None, unit: str, bar: float, note: str = "") -> FaultFigure:
        return self.figure(name, value, unit, note, at_most(value, bar))

    def at_least(self, name: str, value: float | None, unit: str, bar: float, note: str = "") -> FaultFigure:
        return self.figure(name, value, unit, note, at_least(value, bar))

    def equal(self, name: str, value: bool, note: str = "") -> FaultFigure:
        """Yes or no, which should be yes."""
        return self.figure(name, float(value), "", note, ("= 1", value))

    def figure(
        self,
        name: str,
        value: float | None,
        unit: str = "",
        note: str = "",
        bar: tuple[str, bool | None] = ("", None),
    ) -> FaultFigure:
        """Without a bar, or with it."""
        return FaultFigure(
            section=self.section,
            name=name,
            value=value,
            unit=unit,
            bar=bar[0],
            kept=bar[1],
            seed=self.seed,
            fired=self.fired,
            note=note,
        )
