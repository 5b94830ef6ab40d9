"""checkpoint-interval: time of a job beside the best fixed interval in hindsight, which knew all failures.

Useful work done in a given span, with failures at recorded or drawn moments: a checkpoint costs its time, a
failure what was computed since the last one and a restart. The log of InfiniteHBD counts as one job on all
of its nodes, and as three on a third each; every fault that begins stops the job. Figures are hindsight's
useful work ÷ the policy's, i.e. how much longer the same work takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from benchmarks.harness.emptiness import some
from benchmarks.policy_data.fault_log import DAY_S, FILE, load_faults
from benchmarks.policy_sections.sheet import Bench
from entities.orchestrator.checkpointing.checkpoint_schedule import (
    ScheduleTimes,
    daly_interval_s,
    failures_between_s,
)
from policies.numerics.failure_rate import FailureRate

HOUR_S = 3600.0
COSTS_S = (30.0, 120.0, 600.0)
RESTART_S = 60.0
SEEDS = 3
INSTANCES = 16
"""What the expectation before any failure is derived from, as the orchestrator does."""
PRIOR_INSTANCE_S = ScheduleTimes().prior_instance_s
FIXED = np.geomspace(0.3, 3.0, 25)
"""Fixed intervals that are tried, beside the one for the true mean."""


class Interval(Protocol):
    """How long to the next checkpoint; is told of failures."""

    def after(self, now_s: float) -> float: ...

    def failed(self, at_s: float) -> None: ...


class Adaptive:
    """The module's expectation, the orchestrator's formula."""

    def __init__(self, cost_s: float) -> None:
        self._rate = FailureRate(failures_between_s(INSTANCES, 0.0, 0, PRIOR_INSTANCE_S)[0])
        self._cost_s = cost_s
        self._interval_s, self._until_s = 0.0, -math.inf

    def after(self, now_s: float) -> float:
        if now_s >= self._until_s:
            between_s = self._rate.between_s(now_s)
            self._interval_s = daly_interval_s(self._cost_s, between_s)
            self._until_s = now_s + 0.02 * between_s
        return self._interval_s

    def failed(self, at_s: float) -> None:
        self._rate.failed(at_s)
        self._until_s = -math.inf


class Steady:
    """The orchestrator without the module: one rate for all time."""

    def __init__(self, cost_s: float) -> None:
        self._cost_s, self._failures = cost_s, 0

    def after(self, now_s: float) -> float:
        return daly_interval_s(
            self._cost_s, failures_between_s(INSTANCES, now_s, self._failures, PRIOR_INSTANCE_S)[0]
        )

    def failed(self, at_s: float) -> None:
        self._failures += 1


class Fixed:
    """Always the same."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s

    def after(self, now_s: float) -> float:
        return self._interval_s

    def failed(self, at_s: float) -> None: ...


def run(bench: Bench) -> None:
    worst, all_cases = 0.0, 0
    for name, cases in _cases(bench).items():
        figures = np.array(
            [_figures(failures, end_s, cost_s) for failures, end_s in cases for cost_s in COSTS_S]
        )
        adaptive, steady, mean = figures.mean(axis=0)[:3]
        bench.at_most(
            f"time ÷ best fixed interval, {name}",
            adaptive,
            1.01,
            orchestrator_alone=steady,
            fixed_by_the_true_mean=mean,
            worst=figures[:, 0].max(),
            note=f"{len(cases)} runs × {len(COSTS_S)} costs, "
            f"{np.mean([len(one) for one, _ in cases]):.0f} failures",
        )
        bench.told(f"time lost ÷ best fixed interval's, {name}", figures[:, 3].mean())
        worst, all_cases = max(worst, figures[:, 0].max()), all_cases + len(figures)
    bench.told("the worst of all", worst, note=f"{all_cases} runs")
    rate = FailureRate(DAY_S)
    for at in range(200):
        rate.failed(at * HOUR_S)
    bench.latency("inference", lambda: rate.between_s(201 * HOUR_S))


def _cases(bench: Bench) -> dict[str, list[tuple[list[float], float]]]:
    faults = load_faults(bench.data / FILE)
    nodes = sorted({fault.node for fault in faults})
    some(nodes, "nodes with a fault", bench.data / FILE, "the log counts as three jobs", least=3)
    parts = [set(nodes), *(set(nodes[at::3]) for at in range(3))]
    end_s = faults[-1].began_s + DAY_S
    logged = [(sorted({fault.began_s for fault in faults if fault.node in part}), end_s) for part in parts]
    bench.say(
        f"costs {', '.join(f'{one:g}' for one in COSTS_S)} s, restart {RESTART_S:g} s; drawn: {SEEDS} seeds"
    )
    cases = {"InfiniteHBD's log": logged}
    drawn: dict[str, list[tuple[float, float]]] = {
        "steady, 6 h": [(60, 6)],
        "24 h, then 2 h": [(30, 24), (10, 2)],
        "2 h, then 24 h": [(10, 2), (30, 24)],
        "24 h with two days of 30 min": [(15, 24), (1, 0.5), (15, 24), (1, 0.5)],
    }
    for name, regimes in drawn.items():
        cases[name] = [_drawn(np.random.default_rng([bench.seed, seed]), regimes) for seed in range(SEEDS)]
    return cases


def _drawn(rng: np.random.Generator, regimes: Sequence[tuple[float, float]]) -> tuple[list[float], float]:
    """Failures and the end. `regimes`: days, and mean hours between failures."""
    found: list[float] = []
    begins_s = 0.0
    for days, hours in regimes:
        ends_s = begins_s + days * DAY_S
        found += [at for at in _poisson(rng, begins_s, hours * HOUR_S) if at < ends_s]
        begins_s = ends_s
    return found, begins_s


def _poisson(rng: np.random.Generator, at_s: float, mean_s: float) -> Iterator[float]:
    for gap_s in rng.exponential(mean_s, 2000):
        at_s += float(gap_s)
        yield at_s


def _figures(failures: list[float], end_s: float, cost_s: float) -> tuple[float, float, float, float]:
    """Times relative to the best fixed interval's: adaptive, steady, by the true mean; adaptive's loss."""
    usual_s = daly_interval_s(cost_s, end_s / len(failures))
    by_interval = [useful_s(failures, end_s, cost_s, Fixed(usual_s * part)) for part in FIXED]
    best_s = max(by_interval)
    adaptive_s = useful_s(failures, end_s, cost_s, Adaptive(cost_s))
    return (
        best_s / adaptive_s,
        best_s / useful_s(failures, end_s, cost_s, Steady(cost_s)),
        best_s / useful_s(failures, end_s, cost_s, Fixed(usual_s)),
        (end_s - adaptive_s) / (end_s - best_s),
    )


def useful_s(failures: Sequence[float], end_s: float, cost_s: float, interval: Interval) -> float:
    """Seconds of work that are safe at `end_s`."""
    now_s, useful, at = 0.0, 0.0, 0
    while now_s < end_s:
        work_s = interval.after(now_s)
        next_s = failures[at] if at < len(failures) else math.inf
        if now_s + work_s + cost_s <= min(next_s, end_s):
            now_s += work_s + cost_s
            useful += work_s
        elif next_s < end_s:
            while at < len(failures) and failures[at] <= max(now_s, next_s):
                interval.failed(failures[at])
                now_s = failures[at] + RESTART_S
                at += 1
        else:
            useful += max(0.0, end_s - now_s)
            now_s = end_s
    return useful
