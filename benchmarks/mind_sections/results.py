"""Pairs of runs: ratios with 95 % bounds, the part of the gap that was closed, forecasts and outcomes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness.emptiness import some
from benchmarks.harness.figures import Figure, at_least, at_most
from benchmarks.mind_sections.runs import ChangeFigure, MindRun
from benchmarks.mind_sections.scenarios import SCENARIOS

OFF, ON, AGAIN = "off", "on", "off again"
NOT_SLOWER, NOT_SLOWER_CALM = 0.98, 0.99
GAP, CLOSED = 1.10, 0.5
"""Where a planner that knows the script gains so much, half of it is to be gained."""
MEAN = 1.25
ONLY_BY_A_CUT, SOON = "slow-stage", 30
"""Where nothing but a re-cut helps, the job is to be at 0.9 of the new optimum after so many steps."""
FORECAST_ERROR, WORTH_A_FORECAST = 0.15, 0.05
STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Of 95 % on both sides, by degrees of freedom from 1 on; beyond them 1.96 + 2.5 / degrees."""


@dataclass(frozen=True, kw_only=True)
class PairedRatio:
    """The geometric mean of ratios, and the 95 % bounds of that mean; without bounds for one pair."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        bounds = "" if self.low is None else f" ({self.low:.3f}–{self.high:.3f})"
        return f"{self.mean:.3f}{bounds}"


def paired(pairs: Sequence[tuple[float, float]]) -> PairedRatio:
    """Of first ÷ second, by Student's t on their logarithms.

    Raises:
        NothingMeasured: There is no pair.
    """
    logs = [math.log(first / second) for first, second in some(pairs, "pairs of runs")]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return PairedRatio(mean=math.exp(mean), low=None, high=None)
    degrees = len(logs) - 1
    quantile = STUDENT_T[degrees - 1] if degrees <= len(STUDENT_T) else 1.96 + 2.5 / degrees
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return PairedRatio(mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half))


def of_mode(runs: Sequence[MindRun], mode: str) -> list[MindRun]:
    return sorted((run for run in runs if run.mode == mode), key=lambda run: run.number)


def rates(runs: Sequence[MindRun], first: str, second: str) -> PairedRatio:
    """Steps per second under the script, run against run of the same round."""
    pairs = zip(of_mode(runs, first), of_mode(runs, second), strict=True)
    return paired([(one.under, other.under) for one, other in pairs])


def figures_of(name: str, runs: Sequence[MindRun]) -> Iterator[Figure]:
    """What one scenario came to."""
    gain, beside = rates(runs, ON, OFF), rates(runs, AGAIN, OFF)
    least = NOT_SLOWER_CALM if name == "calm" else NOT_SLOWER
    bound = gain.mean if gain.low is None else gain.low
    bar = at_least(bound, least)
    note = f"off again ÷ off {beside}; {len(of_mode(runs, ON))} pairs"
    yield Figure(section=name, name="on ÷ off", value=gain.mean, note=f"{gain}; {note}")
    yield Figure(section=name, name="on ÷ off, at least", value=bound, bar=bar[0], kept=bar[1])
    if SCENARIOS[name].bounded:
        yield from _beside_possible(name, runs, gain.mean)
    if name == ONLY_BY_A_CUT:
        yield _settled(of_mode(runs, ON))
    adopted = sum(len(run.adopted) for run in of_mode(runs, ON))
    changes = [change for run in of_mode(runs, ON) for change in run.changes]
    yield Figure(
        section=name, name="suggestions adopted", value=float(adopted), note=f"{len(changes)} with a forecast"
    )


def _settled(runs: Sequence[MindRun]) -> Figure:
    """After how many steps the job was near the new optimum, in the worst round."""
    counts = [run.settled for run in runs]
    known = [count for count in counts if count is not None]
    most = float(max(known)) if known else None
    bar, kept = at_most(most or 0.0, SOON)
    note = f"{len(known)} of {len(counts)} rounds got there; 0.9 of the best plan for the slow device"
    return Figure(
        section=ONLY_BY_A_CUT,
        name="steps to the new optimum",
        value=most,
        bar=bar,
        kept=kept and len(known) == len(counts),
        note=note,
    )


def _beside_possible(name: str, runs: Sequence[MindRun], gain: float) -> Iterator[Figure]:
    """What a planner that knows the script could do, and the part of it that was done."""
    possible = paired([(run.possible, run.under) for run in of_mode(runs, OFF)]).mean
    yield Figure(section=name, name="possible ÷ off", value=possible)
    if not SCENARIOS[name].deeds:
        routes = paired([(run.by_routes, run.under) for run in of_mode(runs, OFF)]).mean
        note = "the same plan, shared out as well as can be: what weights could gain"
        yield Figure(section=name, name="possible by routes ÷ off", value=routes, note=note)
    if possible >= GAP and not SCENARIOS[name].joins:
        part = (gain - 1.0) / (possible - 1.0)
        bar = at_least(part, CLOSED)
        yield Figure(section=name, name="part of the gap closed", value=part, bar=bar[0], kept=bar[1])


def overall(gains: dict[str, float], changes: Sequence[ChangeFigure]) -> Iterator[Figure]:
    """Of all scenarios: the mean gain without joins, and how well changes were forecast."""
    counted = {name: gain for name, gain in gains.items() if not SCENARIOS[name].joins and name != "calm"}
    if counted:
        mean = math.exp(statistics.fmean(math.log(gain) for gain in counted.values()))
        bar = at_least(mean, MEAN)
        note = f"{len(counted)} scenarios, joins and calm left out"
        yield Figure(section="all", name="on ÷ off, mean", value=mean, bar=bar[0], kept=bar[1], note=note)
    for name in gains:
        if SCENARIOS[name].joins:
            yield Figure(section="all", name=f"on ÷ off, {name}", value=gains[name])
    errors = [
        change.error
        for change in changes
        if change.error is not None and change.expected_gain >= WORTH_A_FORECAST
    ]
    if errors:
        middle = statistics.median(errors)
        bar = at_most(middle, FORECAST_ERROR)
        note = f"{len(errors)} changes of at least {WORTH_A_FORECAST:.0%}"
        yield Figure(
            section="all",
            name="error of a forecast, median",
            value=middle,
            bar=bar[0],
            kept=bar[1],
            note=note,
        )
