"""A job's loss and speed over its whole life, thinned to what a screen can show. Pure."""

from __future__ import annotations

from typing import Any

from entities.gateway.dashboard.rows import significant
from schemas.job import JobEvent, StepResult

POINTS = 1200
"""The most points of one job's curve: about as many as a wide screen has pixels."""


class JobCurve:
    """A job's curve of points `[step, at, loss, tokens_per_s, step_s, gradient_norm]`, oldest first.

    Validations are points `[step, at, loss]`; `step` is the number of steps that were applied by then.
    """

    def __init__(self) -> None:
        self.points: list[list[Any]] = []
        self.validations: list[list[Any]] = []
        self._every = 1

    @property
    def begins_at_zero(self) -> bool:
        return bool(self.points) and self.points[0][0] == 0

    def take_event(self, event: JobEvent) -> None:
        """Adds what a job's event tells of its curve, if anything."""
        if event.result is not None:
            self.take(event.result, event.at)
        if event.validation_step is not None and event.validation_loss is not None:
            self.validated(event.validation_step, event.at, event.validation_loss)

    def take(self, result: StepResult, at: float) -> list[Any] | None:
        """Adds a committed step and returns its point; None if it is known (from stream and bus both).

        A step that is committed again after a roll-back replaces the old point and all later ones.
        """
        point = [
            result.step,
            round(at, 2),
            significant(result.loss, 5),
            significant(result.tokens_per_s, 4),
            significant(result.step_s, 4),
            significant(result.gradient_norm, 4),
        ]
        return point if self._put(point) else None

    def _put(self, point: list[Any]) -> bool:
        while self.points and self.points[-1][0] >= point[0]:
            if self.points[-1][1] >= point[1]:
                return False
            self.points.pop()
        if point[0] % self._every == 0:
            self.points.append(point)
        if len(self.points) > POINTS:
            self._every *= 2
            self.points = [point for point in self.points if point[0] % self._every == 0]
        return True

    def validated(self, step: int, at: float, loss: float) -> list[Any] | None:
        """Adds a validation and returns its point; None if it is known.

        A validation that is repeated after a roll-back replaces the old one and all later ones.
        """
        point = [step, round(at, 2), significant(loss, 5)]
        while self.validations and self.validations[-1][0] >= step:
            if self.validations[-1][1] >= point[1]:
                return None
            self.validations.pop()
        self.validations = [*self.validations[1 - POINTS :], point]
        return point

    def go_on(self, later: JobCurve) -> None:
        """Adds what `later` knows besides: steps and validations that came while this curve was read."""
        for point in later.points:
            self._put(point)
        for step, at, loss in later.validations:
            self.validated(step, at, loss)

    def as_dict(self) -> dict[str, Any]:
        return {"points": self.points, "validations": self.validations}
