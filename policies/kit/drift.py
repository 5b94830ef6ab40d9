"""Whether a module's forecasts of changes still fit what came of them (ADR-0100). Pure.

Each change that a job carries out is measured, and its forecast stands beside its outcome in the job's
events. So every module that forecasts is watched, without a line of its own; learnt modules watch their other
errors themselves (`Policy.drift`, `numerics.drift`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from policies.numerics.drift import MissDrift
from schemas.changes import ChangeState
from schemas.job import JobEvent

HIT = 0.15
"""Relative error of the forecast time of a step up to which a forecast counts as a hit."""
KNOWN = 64
"""Changes that are remembered, so that none is counted twice."""
LESS_SURE = 0.5
"""Factor on the confidence of a module whose forecasts no longer fit."""


@dataclass(slots=True)
class ForecastWatch:
    """The forecasts of one module beside their outcomes."""

    module: str
    misses: MissDrift = field(default_factory=MissDrift)
    _known: deque[tuple[str, int, str]] = field(default_factory=lambda: deque(maxlen=KNOWN))

    def take(self, event: JobEvent) -> None:
        """Takes an event of a job; counts a change of this module whose effect was measured."""
        change = event.change
        if change is None or change.by != self.module or change.forecast is None or change.takes_back:
            return
        if change.state not in (ChangeState.BETTER, ChangeState.NO_BETTER) or change.after_s is None:
            return
        key = (event.job, change.step, change.what)
        if key in self._known:
            return
        self._known.append(key)
        error = abs(change.after_s / change.forecast.step_after_s - 1)
        self.misses.add(miss=error > HIT)

    @property
    def reason(self) -> str:
        """Why its forecasts no longer fit; empty: they do."""
        if not self.misses.drifted:
            return ""
        return f"{self.misses.missed} of {self.misses.seen} forecasts of a step missed by more than {HIT:.0%}"
