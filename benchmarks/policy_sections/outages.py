"""transient or structural: what waiting and replacing cost beside hindsight; are long repairs foreseen?

Injected mixes are drawn; each policy learns as it goes, from nothing. The log of InfiniteHBD is split by
time in halves: features and ridge were chosen on the first, the second is held out; the model goes on
learning there from what is known at each moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from benchmarks.harness.emptiness import both_classes, some
from benchmarks.policy_data.fault_log import DAY_S, FILE, load_faults
from benchmarks.policy_sections.scores import auroc
from benchmarks.policy_sections.sheet import Bench
from policies.contrib.repair_outlook import RepairOutlook
from policies.numerics.allocation.path_split import Bools
from policies.numerics.features import Floats
from policies.numerics.outages import OutageHistory

PRICE_S = 120.0
"""A replacement: a process, its state from a peer, a group that is built anew."""
DRAWN = 600
"""Outages per mix and seed."""
SEEDS = 5
LOGGED_H = (1.0, 6.0, 24.0)
"""Prices of a replacement that InfiniteHBD's repairs are held against."""
WATCHED_H = (0.25, 1.0, 3.0, 6.0)
FIRST = 60
"""Faults from which the outlook only learns."""


class Kind(NamedTuple):
    """A part of a mix: how often, which part lasts, and the median and spread of what does not."""

    often: float
    lasting: float
    median_s: float
    spread: float


LINK, DEVICE, FROZEN = Kind(0.6, 0.05, 2.0, 0.7), Kind(0.15, 0.95, 5.0, 0.7), Kind(0.25, 0.3, 8.0, 0.7)
MIXES: dict[str, tuple[dict[str, Kind], ...]] = {
    "flaps and few failures": ({"link": LINK, "frozen": FROZEN._replace(lasting=0.1)},),
    "three kinds": ({"link": LINK, "device": DEVICE, "frozen": FROZEN},),
    "mostly structural": ({"device": DEVICE, "frozen": FROZEN._replace(lasting=0.8)},),
    "change of regime": (
        {"link": LINK, "frozen": FROZEN},
        {"link": LINK._replace(lasting=0.7), "frozen": FROZEN._replace(median_s=1.0)},
    ),
}


def run(bench: Bench) -> None:
    for name, regimes in MIXES.items():
        figures = np.array(
            [_mix(np.random.default_rng([bench.seed, one]), regimes) for one in range(SEEDS)]
        ).mean(axis=0)
        bench.at_most(
            f"decision cost ÷ hindsight, {name}",
            figures[0],
            1.15,
            wait_for_the_price=figures[1],
            replace_at_once=figures[2],
            best_fixed_wait=figures[3],
            best_by_kind=figures[4],
            knows_the_mix=figures[5],
            note=f"mean of {SEEDS} seeds",
        )
    for hours in LOGGED_H:
        _logged(bench, hours * 3600.0)
    _repairs(bench)
    held = OutageHistory(PRICE_S)
    rng = np.random.default_rng(bench.seed)
    for seconds in rng.lognormal(1, 1, 200):
        held.ended("link", float(seconds))
    bench.latency("inference", lambda: held.patience_s("link"))


def _mix(rng: np.random.Generator, regimes: tuple[dict[str, Kind], ...]) -> tuple[float, ...]:
    """Costs ÷ hindsight's: learnt, waiting for the price, at once, best wait, best by kind and regime, and by
    whoever knows what the outages are drawn from: no policy does better on average."""
    drawn = [
        (number, *one)
        for number, regime in enumerate(regimes)
        for one in _draw(rng, regime, DRAWN // len(regimes))
    ]
    seconds = np.array([one[2] for one in drawn])
    hindsight = np.minimum(seconds, PRICE_S).sum()
    outages, learnt, informed = OutageHistory(PRICE_S), 0.0, 0.0
    for number, kind, lasted in drawn:
        learnt += _cost(np.array([lasted]), outages.patience_s(kind))
        outages.ended(kind, lasted)
        informed += _cost(np.array([lasted]), _best_patience_s(regimes[number][kind]))
    by_kind = sum(
        _best(np.array([one[2] for one in drawn if one[:2] == which]))
        for which in sorted({one[:2] for one in drawn})
    )
    return (
        learnt / hindsight,
        _cost(seconds, PRICE_S) / hindsight,
        _cost(seconds, 0.0) / hindsight,
        _best(seconds) / hindsight,
        by_kind / hindsight,
        informed / hindsight,
    )


def _draw(rng: np.random.Generator, regime: dict[str, Kind], count: int) -> Iterator[tuple[str, float]]:
    often = np.array([kind.often for kind in regime.values()])
    for name in rng.choice(list(regime), size=count, p=often / often.sum()):
        kind = regime[str(name)]
        if rng.random() < kind.lasting:
            yield str(name), float(PRICE_S * 5 * (1 + rng.pareto(1.0)))
        else:
            yield str(name), float(kind.median_s * rng.lognormal(0, kind.spread))


@cache
def _best_patience_s(kind: Kind) -> float:
    """The wait of least expected cost, by a large sample of what ends by itself."""
    ends = kind.median_s * np.random.default_rng(0).lognormal(0, kind.spread, 20_000)
    waits = np.append(0.0, np.geomspace(PRICE_S / 300, PRICE_S, 200))
    costs = [
        kind.lasting * (wait + PRICE_S) + (1 - kind.lasting) * _cost(ends, wait) / len(ends) for wait in waits
    ]
    return float(waits[int(np.argmin(costs))])


def _cost(seconds: Floats, patience_s: float) -> float:
    return float(np.where(seconds <= patience_s, seconds, patience_s + PRICE_S).sum())


def _best(seconds: Floats) -> float:
    """The least cost of one fixed wait."""
    return min(_cost(seconds, wait) for wait in (0.0, *np.minimum(seconds, PRICE_S)))


def _logged(bench: Bench, price_s: float) -> None:
    """Waiting for a repair, or replacing the node, on the log of InfiniteHBD, from nothing."""
    outages, learnt = OutageHistory(price_s), 0.0
    seconds = []
    for fault in load_faults(bench.data / FILE):
        seconds.append(min(fault.ended_s - fault.began_s, 1e9))
        patience_s = outages.patience_s(fault.what)
        learnt += seconds[-1] if seconds[-1] <= patience_s else patience_s + price_s
        outages.ended(fault.what, seconds[-1])
    lasted = np.array(seconds)
    hindsight = np.minimum(lasted, price_s).sum()
    fixed = min(np.where(lasted <= wait, lasted, wait + price_s).sum() for wait in (0.0, *lasted))
    bench.told(
        f"the same on InfiniteHBD's log, a replacement costs {price_s / 3600:g} h",
        learnt / hindsight,
        wait_for_the_price=float(np.where(lasted <= price_s, lasted, 2 * price_s).sum() / hindsight),
        replace_at_once=len(lasted) * price_s / hindsight,
        best_fixed_wait=float(fixed / hindsight),
    )


def _repairs(bench: Bench) -> None:
    faults = load_faults(bench.data / FILE)
    outlook, scores = RepairOutlook(DAY_S), np.zeros(len(faults))
    numbers: list[int] = []
    moments = sorted(
        [(fault.began_s, 1, at) for at, fault in enumerate(faults)]
        + [
            (max(fault.ended_s, fault.began_s + 1.0), 0, at)
            for at, fault in enumerate(faults)
            if np.isfinite(fault.ended_s)
        ]
    )
    for at_s, begins, at in moments:
        if begins:
            assert at == len(numbers)
            numbers.append(outlook.began(faults[at].what, at_s))
            scores[at] = outlook.longer(numbers[at])
        elif at < len(numbers):
            outlook.repaired(numbers[at], at_s)
    lasted = np.array([fault.ended_s - fault.began_s for fault in faults])
    long = lasted > DAY_S
    half = len(faults) // 2
    some(faults, "faults", bench.data / FILE, "the first 60 are only learnt from", least=2 * (FIRST + 1))
    for part, rows in (("of the first half", long[FIRST:half]), ("held out", long[half:])):
        both_classes(rows, f"faults {part} (repaired within a day, or not)", bench.data / FILE)
    bench.say(
        f"InfiniteHBD: {len(faults)} faults, the first {half} to choose by, {len(faults) - half} held out "
        f"({long[half:].mean():.0%} of them longer than a day)"
    )
    kind_rate = _kind_rate([fault.what for fault in faults], long, half)
    bench.at_least(
        "repair > 1 day, AUROC when the fault begins",
        auroc(scores[half:], long[half:]),
        0.70,
        by_kind_of_fault=auroc(kind_rate[half:], long[half:]),
        first_half=auroc(scores[FIRST:half], long[FIRST:half]),
        note="the first half is what it was chosen on",
    )
    for hours in WATCHED_H:
        over = lasted <= hours * 3600
        watched = np.where(over, -1.0, scores)
        bench.at_least(
            f"the same after {hours:g} h of waiting",
            auroc(watched[half:], long[half:]),
            0.70,
            waiting_alone=auroc((~over[half:]).astype(float), long[half:]),
        )
    bench.latency("inference, repair outlook", lambda: outlook.longer(len(faults) - 1), calls=100)


def _kind_rate(kinds: list[str], long: Bools, half: int) -> Floats:
    """Part of long repairs by kind in the first half, drawn to the mean by two faults."""
    mean = long[:half].mean()
    found = []
    for kind in kinds:
        of_kind = [bool(long[at]) for at in range(half) if kinds[at] == kind]
        found.append((sum(of_kind) + 2 * mean) / (len(of_kind) + 2))
    return np.array(found)
