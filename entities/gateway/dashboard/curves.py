"""A job's curves: every committed step while there are few, then every second, fourth, … Pure."""

from __future__ import annotations

from typing import Any

from entities.gateway.dashboard.rows import significant
from schemas.job import StepResult

POINTS = 1200
"""Points of one job at most; as many as a wide screen has pixels."""


class Curve:
    """Points `[step, at, loss, tokens_per_s, step_s, gradient_norm]`, oldest first."""

    def __init__(self) -> None:
        self.points: list[list[Any]] = []
        self.validations: list[list[Any]] = []
        self._every = 1

    def take(self, result: StepResult, at: float) -> list[Any] | None:
        """A committed step; None where it was known, as from stream and bus both. One that is committed again
        after a roll-back takes the place of the later ones."""
        point = [
            result.step,
            round(at, 2),
            significant(result.loss, 5),
            significant(result.tokens_per_s, 4),
            significant(result.step_s, 4),
            significant(result.gradient_norm, 4),
        ]
        while self.points and self.points[-1][0] >= result.step:
            if self.points[-1][1] >= point[1]:
                return None
            self.points.pop()
        if result.step % self._every == 0:
            self.points.append(point)
        if len(self.points) > POINTS:
            self._every *= 2
            self.points = [kept for kept in self.points if kept[0] % self._every == 0]
        return point

    def validated(self, step: int, at: float, loss: float) -> None:
        if not any(known[0] == step for known in self.validations):
            self.validations = [*self.validations[1 - POINTS :], [step, round(at, 2), significant(loss, 5)]]

    def as_dict(self) -> dict[str, Any]:
        return {"points": self.points, "validations": self.validations}
