"""One learnt module against routes by expected completion alone, over unseen seeds: pairs, and what they say.

Off is no module, and automation off: senders share microbatches out by expected completion, and nobody
changes an instance. Of each pair the script is the same; scripts differ by seed in which slot, when and how
much. The test is Wilcoxon's of signed ranks, exact, on both sides, and corrected after Holm for the number
of scenarios (Wilcoxon 1945, doi:10.2307/3001968; Holm 1979, Scand. J. Statist. 6, 65).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.emptiness import some
from benchmarks.harness.figures import Figure, at_least, at_most
from benchmarks.mind_sections.results import OFF, of_mode, rates
from benchmarks.mind_sections.runs import ChangeFigure, MindRun

LEARNT, UNTRAINED, RULES, OFF_BESIDE_RULES = "learnt", "untrained", "rules", "off beside rules"
"""Modes beside off: the module; the same before its training; the orchestrator's own loop without modules."""
AGAINST = (UNTRAINED, RULES)
MODULES = {
    LEARNT: ("change-outcomes",),
    UNTRAINED: (str(Path(__file__).parent / "untrained_outcomes.py"),),
}
SECTION = "learnt"
LEARNT_SCENARIOS = ("slow-device", "noisy-neighbour", "lone-device")
"""Those where a change of instances has room (ADR-0103); the others need other actions."""
UNSEEN = 9_000
"""Seeds of scripts from here on: neither training nor another section uses them."""
CALM_S, LASTS_S, TAIL, PAD_MS, PAIRS = 7.0, 12.0, 1.2, 5.0, 10
"""A run takes 25 s."""
GAIN, LEVEL, SCENARIOS_TO_WIN = 1.03, 0.05, 3
MOST_EXACT = 16


def signed_rank_p(logs: Sequence[float]) -> float:
    """The two-sided p of Wilcoxon's test that these differences are symmetrical about 0, exact.

    Differences of 0 are left out; equal sizes share their ranks. Up to `MOST_EXACT` pairs.

    Raises:
        NothingMeasured: There is no difference at all.
    """
    found = some([each for each in logs if each], "differences between pairs of runs")[:MOST_EXACT]
    sizes = sorted(map(abs, found))
    ranks = {
        size: sum(place + 1 for place, other in enumerate(sizes) if other == size) / sizes.count(size)
        for size in sizes
    }
    all_ranks = [ranks[abs(each)] for each in found]
    total = sum(all_ranks)
    here = min(plus := sum(ranks[each] for each in found if each > 0), total - plus)
    as_extreme = sum(
        min(signed := sum(itertools.compress(all_ranks, signs)), total - signed) <= here + 1e-9
        for signs in itertools.product((0, 1), repeat=len(found))
    )
    return as_extreme / float(2 ** len(found))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Corrected after Holm for as many tests as there are."""
    corrected, largest = {}, 0.0
    for place, (name, value) in enumerate(sorted(p_values.items(), key=lambda item: (item[1], item[0]))):
        largest = max(largest, min(1.0, (len(p_values) - place) * value))
        corrected[name] = largest
    return corrected


def differences(runs: Sequence[MindRun], mode: str) -> list[float]:
    """Logarithms of steps per second, of this mode ÷ off, pair by pair."""
    pairs = zip(of_mode(runs, mode), of_mode(runs, OFF), strict=True)
    return [math.log(one.under / other.under) for one, other in pairs]


def learnt_figures(runs: Mapping[str, Sequence[MindRun]]) -> Iterator[Figure]:
    """Of all scenarios that were run: gain and p of each, and in how many it is faster."""
    p_values = {name: signed_rank_p(differences(each, LEARNT)) for name, each in runs.items()}
    corrected, faster = holm(p_values), 0
    for name, each in runs.items():
        gain = rates(each, LEARNT, OFF)
        won = gain.mean >= GAIN and corrected[name] < LEVEL
        faster += won
        bar = at_least(gain.mean, GAIN)
        note = f"{gain}; {len(of_mode(each, LEARNT))} pairs"
        yield Figure(section=name, name="learnt ÷ off", value=gain.mean, bar=bar[0], kept=bar[1], note=note)
        yield Figure(
            section=name,
            name="p after Holm",
            value=corrected[name],
            bar=f"< {LEVEL:g}",
            kept=corrected[name] < LEVEL,
            note=f"{p_values[name]:.4f} alone; Wilcoxon's signed ranks, two-sided",
        )
        yield from _beside(name, each)
    yield Figure(
        section=SECTION,
        name="scenarios in which it is faster",
        value=float(faster),
        bar=f"≥ {SCENARIOS_TO_WIN}",
        kept=faster >= SCENARIOS_TO_WIN,
        note=f"gain ≥ {GAIN - 1:.0%} and p < {LEVEL:g} after Holm, of {len(runs)}",
    )
    yield from _forecasts(
        [change for each in runs.values() for run in of_mode(each, LEARNT) for change in run.changes]
    )


def _beside(name: str, runs: Sequence[MindRun]) -> Iterator[Figure]:
    for mode, off in ((UNTRAINED, OFF), (RULES, OFF_BESIDE_RULES)):
        if of_mode(runs, mode):
            ratio = rates(runs, mode, off)
            yield Figure(section=name, name=f"{mode} ÷ off", value=ratio.mean, note=str(ratio))
    yield Figure(
        section=name,
        name="changes made",
        value=float(sum(len(run.changes) for run in of_mode(runs, LEARNT))),
        note=f"{sum(bool(run.changes) for run in of_mode(runs, LEARNT))} runs with one",
    )


def _forecasts(changes: Sequence[ChangeFigure]) -> Iterator[Figure]:
    errors = sorted(change.error for change in changes if change.error is not None)
    if errors:
        middle = errors[len(errors) // 2]
        bar = at_most(middle, 0.15)
        note = f"{len(errors)} changes that were judged"
        yield Figure(
            section=SECTION,
            name="error of a forecast, median",
            value=middle,
            bar=bar[0],
            kept=bar[1],
            note=note,
        )
