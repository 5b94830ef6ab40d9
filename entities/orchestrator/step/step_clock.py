"""What a step's time goes to: marks as its phases pass, read when it is decided."""

from __future__ import annotations

import time
from typing import Literal

from schemas.job import StepPhases

Mark = Literal["begun", "prepare", "record"]


class StepClock:
    """The open step's. A later mark of the same name counts: the last stage's prepare, the last record."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._marks: dict[Mark, float] = {}

    def begin(self) -> None:
        """The step, or another attempt at it, begins."""
        self._began, self._marks = time.monotonic(), {}

    def mark(self, name: Mark) -> None:
        self._marks[name] = time.monotonic()

    def phases(self) -> StepPhases | None:
        """Up to now; None where the step was not begun here: a loop that took it over."""
        if self._began is None:
            return None
        now = time.monotonic()
        begun = self._marks.get("begun", now)
        prepare = max(begun, self._marks.get("prepare", now))
        record = max(prepare, self._marks.get("record", now))
        return StepPhases(
            begin_s=begun - self._began,
            claims_s=prepare - begun,
            prepare_s=record - prepare,
            decide_s=now - record,
        )
