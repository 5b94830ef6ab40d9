"""When the next checkpoint is due, and why (pure; docs/adr/0011-checkpoints.md).

`training.checkpoint_every` is a number of steps, or `auto`:

    T = Daly's interval for cost C and mean time between failures M
        √(2·C·M) · (1 + √(C/2M)/3 + C/18M) − C   where C < 2·M, else M
    C   seconds a checkpoint costs: the stall of its copy and its writing, as measured
    M   (prior + observed hours) / (1 + observed failures), or what a functional module expects instead
    T·2 where the loss has flattened (reference: adaptive checkpoints by loss trend and hardware health)
    due at once, and M at most `risky_s`, where a device shows signs of failing

Young (1974), doi:10.1145/361147.361115; Daly (2006), doi:10.1016/j.future.2004.11.016.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Trend = Literal["unknown", "falling", "flat", "rising"]

RISK = 0.7
"""Above this score a device counts as failing (reference: AdaptiveCheckpoint)."""
TREND_STEPS = 32
"""Losses from which the trend is computed; with fewer the trend is unknown."""
FLAT = 0.01
"""Relative change of the median loss between the two halves of these steps, below which the loss is flat."""
FLAT_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class ScheduleTimes:
    """What is assumed where nothing was measured, in seconds."""

    prior_instance_s: float = 14 * 86_400.0
    """Between failures of one instance before any was seen: two weeks; of 16 instances, a day."""
    first_s: float = 60.0
    """Interval before the first checkpoint; its cost is unknown before that."""
    risky_s: float = 600.0
    """Mean time to a failure where a device shows signs of failing."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the decision depends on. Unknown figures are None."""

    step: int
    last_step: int
    steps: int
    step_s: float | None = None
    cost_s: float | None = None
    observed_s: float = 0.0
    failures: int = 0
    instances: int = 1
    losses: Sequence[float] = ()
    risk: float = 0.0
    risk_reason: str = ""
    risk_answered: bool = False
    expected_s: float | None = None
    """Seconds between failures that a functional module expects; replaces the observed mean."""
    expected_by: str = ""


@dataclass(frozen=True)
class Choice:
    """Whether a checkpoint is due now; the present number of steps between two; and why."""

    due: bool
    interval_steps: int
    reason: str


def choose(
    every: int | Literal["auto"], conditions: Conditions, times: ScheduleTimes = ScheduleTimes()
) -> Choice:
    """The decision at a step boundary.

    Args:
        every: `training.checkpoint_every`.
        conditions: `step` steps are applied; the last checkpoint, or the beginning, was at `last_step`.
            `risk_answered`: there has been a checkpoint since the risk rose.
        times: what is assumed where nothing was measured.
    """
    if every != "auto":
        if every == 0:
            return Choice(False, 0, "no checkpoints are wanted")
        return Choice(conditions.step % every == 0 and conditions.step > 0, every, f"every {every} steps")
    risky = conditions.risk > RISK
    interval_s, reason = _interval(conditions, risky, times)
    trend = loss_trend(conditions.losses)
    if trend == "flat" and not risky:
        interval_s *= FLAT_FACTOR
        reason += f"; ×{FLAT_FACTOR:g}: the loss is flat"
    steps = max(1, round(interval_s / conditions.step_s)) if conditions.step_s else conditions.steps
    ahead = conditions.step - conditions.last_step
    left = conditions.steps - conditions.step
    if left <= 0 or ahead <= 0:
        return Choice(False, steps, reason)
    if risky and not conditions.risk_answered:
        return Choice(True, steps, f"at once: {conditions.risk_reason}; then {reason}")
    return Choice(ahead >= steps, steps, reason)


def _interval(conditions: Conditions, risky: bool, times: ScheduleTimes) -> tuple[float, str]:
    between_s, why = failures_between_s(
        conditions.instances, conditions.observed_s, conditions.failures, times.prior_instance_s
    )
    if conditions.expected_s is not None:
        between_s, why = conditions.expected_s, f"expected by {conditions.expected_by}; {why}"
    if risky and between_s > times.risky_s:
        between_s, why = times.risky_s, conditions.risk_reason
    if conditions.cost_s is None:
        return times.first_s, f"{_span(times.first_s)}: the first, whose cost is not known yet"
    interval_s = daly_interval_s(conditions.cost_s, between_s)
    return interval_s, (
        f"{_span(interval_s)}: costs {_span(conditions.cost_s)}, a failure per {_span(between_s)} ({why})"
    )


def daly_interval_s(cost_s: float, between_failures_s: float) -> float:
    """Seconds of work between checkpoints that lose the least time (Daly's higher-order estimate)."""
    if cost_s >= 2 * between_failures_s:
        return between_failures_s
    part = cost_s / (2 * between_failures_s)
    young_s = math.sqrt(2 * cost_s * between_failures_s)
    return young_s * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def failures_between_s(
    instances: int, observed_s: float, failures: int, prior_instance_s: float
) -> tuple[float, str]:
    """Mean seconds between failures of the job, and the figures that it is based on.

    The prior weighs as much as one failure in `prior_instance_s` / instances: an hour without a failure
    proves little, three failures in an hour prove much.
    """
    prior_s = prior_instance_s / max(1, instances)
    seen = f"{failures} in {_span(observed_s)}, {instances} instances"
    return (prior_s + observed_s) / (1 + failures), seen


def loss_trend(losses: Sequence[float]) -> Trend:
    """The trend of the loss, by the medians of the two halves of the last `TREND_STEPS` losses."""
    recent = [loss for loss in losses[-TREND_STEPS:] if math.isfinite(loss)]
    if len(recent) < TREND_STEPS:
        return "unknown"
    older, newer = (
        statistics.median(half) for half in (recent[: len(recent) // 2], recent[len(recent) // 2 :])
    )
    change = (newer - older) / max(abs(older), 1e-12)
    if abs(change) < FLAT:
        return "flat"
    return "falling" if change < 0 else "rising"


def _span(seconds: float) -> str:
    """A duration for people."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
