"""What a sweep does next: parks, resumes or cancels trials (ADR-0052). Pure.

All trials are jobs of one array (ADR-0087), which the queue starts. A sweep without rungs waits for them.
With rungs (successive halving, Jamieson and Talwalkar
2016), a trial stops at each rung until all that got there are judged by the objective at the rung's step; one
in `factor` goes on, and the others are cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from schemas.job import ENDED, JobState


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What decides, of a sweep file. `rungs` are steps, rising; empty: every trial runs to its end."""

    trials: int
    minimise: bool = True
    rungs: tuple[int, ...] = ()
    factor: float = 3.0


@dataclass(frozen=True, kw_only=True)
class TrialView:
    """What is known of a trial. `at_rung`: the objective at each rung that it has passed.

    `stopped`: this sweep has parked it, or is doing so.
    """

    state: JobState
    at_rung: Mapping[int, float] = field(default_factory=dict)
    stopped: bool = False

    @property
    def over(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class SweepAction:
    """A thing to do to a trial, and why."""

    kind: Literal["park", "resume", "cancel"]
    trial: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SweepDecision:
    """What to do now. `rung`: the one that is open; None: the trials that are left run to their end."""

    actions: tuple[SweepAction, ...]
    rung: int | None
    left: tuple[int, ...]
    over: bool


def decide(plan: SweepPlan, views: Mapping[int, TrialView]) -> SweepDecision:
    """The next actions; `views` are those of the trials, by number."""
    left = list(range(plan.trials))
    for rung in plan.rungs:
        judged = {trial: views[trial].at_rung[rung] for trial in left if _passed(views, trial, rung)}
        pending = [trial for trial in left if trial not in judged and not _over(views, trial)]
        if pending:
            actions = _until(rung, plan, views, left, judged)
            return SweepDecision(actions=actions, rung=rung, left=tuple(left), over=False)
        left = promoted(judged, plan)
    actions = (*_dropped(plan, views, left), *_resumed(views, left))
    over = all(_over(views, trial) for trial in {*left, *views})
    return SweepDecision(actions=actions, rung=None, left=tuple(left), over=over)


def promoted(judged: Mapping[int, float], plan: SweepPlan) -> list[int]:
    """The trials that go on from a rung, by number: one in `factor`, rounded up; of equal ones, the earlier.

    A value that is not finite is worse than any other.
    """
    keep = math.ceil(len(judged) / plan.factor)
    return sorted(ranked(judged, minimise=plan.minimise)[:keep])


def ranked(values: Mapping[int, float], *, minimise: bool) -> list[int]:
    """Trials from the best to the worst."""

    def key(trial: int) -> tuple[float, int]:
        value = values[trial] if minimise else -values[trial]
        return (value if math.isfinite(value) else math.inf), trial

    return sorted(values, key=key)


def _until(
    rung: int,
    plan: SweepPlan,
    views: Mapping[int, TrialView],
    left: Sequence[int],
    judged: Mapping[int, float],
) -> tuple[SweepAction, ...]:
    """The actions while a rung is open."""
    stops = [
        SweepAction("park", trial, f"waits at rung {rung}")
        for trial in judged
        if not views[trial].over and not views[trial].stopped
    ]
    before = [trial for trial in left if trial not in judged]
    return (*_dropped(plan, views, left), *stops, *_resumed(views, before))


def _dropped(plan: SweepPlan, views: Mapping[int, TrialView], left: Sequence[int]) -> tuple[SweepAction, ...]:
    """Cancels what did not get past its rung."""
    gone = sorted(trial for trial, view in views.items() if trial not in left and not view.over)
    return tuple(
        SweepAction("cancel", trial, f"left out at rung {_last(plan, views[trial])}") for trial in gone
    )


def _last(plan: SweepPlan, view: TrialView) -> int | None:
    return max((rung for rung in plan.rungs if rung in view.at_rung), default=None)


def _resumed(views: Mapping[int, TrialView], wanted: Sequence[int]) -> Iterator[SweepAction]:
    """Has those of `wanted` trials go on that were stopped; the queue knows how many run at a time."""
    for trial in wanted:
        if trial in views and views[trial].stopped and not views[trial].over:
            yield SweepAction("resume", trial, "goes on")


def _passed(views: Mapping[int, TrialView], trial: int, rung: int) -> bool:
    return trial in views and rung in views[trial].at_rung


def _over(views: Mapping[int, TrialView], trial: int) -> bool:
    return trial in views and views[trial].over
