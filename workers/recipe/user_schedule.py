"""A schedule that is a function of the user's: (step, total) → factor of the peak learning rate.

Only instances call it. Each stage's vote carries the rate; the orchestrator decides it if all agree, and
everyone applies the decided number. So a function that gives different numbers on different nodes changes no
bit: the step is begun again, and in the end the job parks with this reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schemas.errors import BadModel
from schemas.job_file.recipe import MOST_STEPS
from schemas.job_file.training import TrainingSpec
from workers.user_code import describe, load

HIGHEST = 1e6
"""Largest factor."""


class UserSchedule:
    """`training.schedule.factory`, called with the step and the number of steps (None: not known)."""

    def __init__(self, name: str, training: TrainingSpec) -> None:
        self._name = name
        self._factor: Callable[..., Any] = load(name)
        self._training = training

    def rate(self, step: int) -> float:
        """The learning rate of a step.

        Raises:
            BadModel: The function fails, or gives no number from 0 on.
        """
        training = self._training
        total = training.steps if training.steps < MOST_STEPS else None
        place = f"training.schedule.factory: {self._name}({step}, {total})"
        try:
            factor = float(self._factor(step, total))
        except Exception as error:  # user code may raise anything
            raise BadModel(f"{place}: {describe(error)}") from error
        if not 0 <= factor <= HIGHEST:  # also false for NaN
            raise BadModel(f"{place} gave {factor}; it must give a factor of the peak rate, from 0 on")
        if step < training.schedule.warmup_steps:
            factor *= (step + 1) / training.schedule.warmup_steps
        return training.optimizer.lr * factor

    def check(self) -> None:
        """Calls it for the first and the last step, twice each.

        Raises:
            BadModel: It fails, or is not the same each time.
        """
        last = self._training.steps - 1
        for step in (0, 1, min(last, 1000), last):
            first, again = self.rate(step), self.rate(step)
            if first != again or not math.isfinite(first):
                raise BadModel(
                    f"training.schedule.factory: {self._name}({step}, …) gave {first}, then {again}; it must "
                    "depend on its arguments alone"
                )


def user_schedule(training: TrainingSpec) -> UserSchedule | None:
    """The job's own schedule; None: it has one by name."""
    factory = training.schedule.factory
    return None if factory is None else UserSchedule(factory, training)
