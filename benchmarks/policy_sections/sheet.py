"""The tables of `built_in_policies`: each figure beside its baselines and its bar, printed and in JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.harness.emptiness import NothingMeasured
from benchmarks.harness.figures import Figure, Sheet, at_least, at_most

INFERENCE_P99_MS = 10.0
"""The bar for one inference of any built-in module."""


@dataclass(frozen=True, kw_only=True)
class Row(Figure):
    """One figure beside its baselines."""

    baselines: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for label, value in self.baselines.items():
            if np.isnan(value):
                raise NothingMeasured(f"nan of {label!r}", f"the figure {self.name!r}")

    def cells(self) -> tuple[str, ...]:
        """As printed: figure, module, baselines, bar, verdict, note."""
        beside = ", ".join(f"{name} {number(value)}" for name, value in self.baselines.items())
        value = "–" if self.value is None else f"{number(self.value)} {self.unit}".rstrip()
        return (self.name, value, beside, self.bar, self.verdict, self.note)


HEAD = ("figure", "module", "baselines", "bar", "", "")


def number(value: float) -> str:
    """Three decimals, less where they are zeros; four digits where it is large."""
    if not np.isfinite(value):
        return str(value)
    text = f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def table(rows: list[Row]) -> str:
    """Aligned text, one line a row."""
    lines = [HEAD, *[row.cells() for row in rows]]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


class Bench:
    """What a section is given.

    Attributes:
        data: the folder with te/, topo/, telemetry/, failures/, …
        seed: of whatever the section draws.
        pictures: the folder for PNGs; None: draw none.
        solver_s: seconds that a solver has for each proof; 0: prove nothing.
    """

    def __init__(
        self,
        *,
        data: Path,
        seed: int,
        sheet: Sheet[Row],
        pictures: Path | None = None,
        solver_s: float = 0.0,
    ) -> None:
        self.data = data
        self.pictures = pictures
        self.solver_s = solver_s
        self.seed = seed
        self._sheet = sheet
        self._section = ""
        self._rows: list[Row] = []

    def begin(self, section: str, what: str) -> None:
        self._section, self._rows = section, []
        print(f"\n{section}: {what} (seed {self.seed})", flush=True)

    def say(self, text: str) -> None:
        """A line above the table: data, split, what was chosen on the training part."""
        print(f"  {text}", flush=True)

    def end(self, took_s: float) -> None:
        """Prints what the section found, also if it broke off."""
        if self._rows:
            print(table(self._rows))
        print(f"  {took_s:.0f} s", flush=True)
        self._sheet.add(*self._rows)
        self._rows = []

    # --- rows -----------------------------------------------------------------------------------------
    def at_least(
        self, name: str, value: float, bar: float, *, unit: str = "", note: str = "", **beside: float
    ) -> None:
        """A figure that should be at least `bar`; `beside` are the baselines, `_` in their names a blank."""
        self._add(name, value, unit, beside, at_least(value, bar), note)

    def at_most(
        self, name: str, value: float, bar: float, *, unit: str = "", note: str = "", **beside: float
    ) -> None:
        """A figure that should be at most `bar`."""
        self._add(name, value, unit, beside, at_most(value, bar), note)

    def told(
        self, name: str, value: float | None, *, unit: str = "", note: str = "", **beside: float
    ) -> None:
        """A figure without a bar."""
        self._add(name, value, unit, beside, ("", None), note)

    def latency(self, name: str, call: Callable[[], object], *, calls: int = 300) -> None:
        """The p99 of one inference, in this process, beside the bar for all built-in modules.

        By the clock; what it computed is noted beside it, for on a busy machine the p99 is mostly waiting.
        """
        call()
        took, computed = [], []
        for _ in range(calls):
            began, before = time.perf_counter(), time.thread_time()
            call()
            took.append(1e3 * (time.perf_counter() - began))
            computed.append(1e3 * (time.thread_time() - before))
        p50, p99 = np.percentile(took, (50, 99))
        note = f"p50 {p50:.2f} ms, computing p99 {np.percentile(computed, 99):.2f} ms, {calls} calls"
        self.at_most(name, float(p99), INFERENCE_P99_MS, unit="ms", note=note)

    def _add(
        self,
        name: str,
        value: float | None,
        unit: str,
        beside: Mapping[str, float],
        bar: tuple[str, bool | None],
        note: str,
    ) -> None:
        baselines = {label.replace("_", " "): float(figure) for label, figure in beside.items()}
        value = None if value is None else float(value)
        self._rows.append(
            Row(
                section=self._section,
                name=name,
                value=value,
                unit=unit,
                baselines=baselines,
                bar=bar[0],
                kept=bar[1],
                note=note,
            )
        )
