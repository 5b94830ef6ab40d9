"""What a job's validations have decided so far: when its training ends, and how far its rate has fallen.

Pure: a fold over validations in the order of their steps. The result is part of the job's record, and of each
checkpoint's manifest as it was at that step. So whoever goes back to a checkpoint goes back to its decisions,
and a resumed job stops where the other one would have stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import Field

from schemas.base import Part
from schemas.job_file.training import TrainingSpec


class WatchedMetric(Part):
    """A metric's best value so far, and for how many validations it has not improved since."""

    best: float | None = None
    stale: int = 0

    def observed(self, value: float | None, mode: str, min_delta: float) -> WatchedMetric:
        """After one more validation. A value that is missing or not finite is no improvement."""
        if value is None or not math.isfinite(value):
            return WatchedMetric(best=self.best, stale=self.stale + 1)
        gain = math.inf if self.best is None else (self.best - value if mode == "min" else value - self.best)
        if gain > min_delta:
            return WatchedMetric(best=value, stale=0)
        return WatchedMetric(best=self.best, stale=self.stale + 1)


class RecipeProgress(Part):
    """The state of the fold after the validation at `step`; -1: there was none."""

    step: int = -1
    until: WatchedMetric = WatchedMetric()
    plateau: WatchedMetric = WatchedMetric()
    drops: int = Field(0, description="how often the plateau has lowered the learning rate")
    stopped_at: int | None = Field(None, description="steps after which a metric ended the training")
    because: str = ""


def observed(
    progress: RecipeProgress, training: TrainingSpec, step: int, values: Mapping[str, float]
) -> RecipeProgress:
    """The progress after the validation at `step`; a validation that was counted before changes nothing.

    Args:
        progress: After the validation before.
        training: The job's training section.
        step: Steps applied when the validation was made.
        values: Metric → value; a set's metrics are also there as `set/metric`.
    """
    if step <= progress.step:
        return progress
    until, schedule = training.until, training.schedule
    watched, plateau = progress.until, progress.plateau
    drops, stopped_at, because = progress.drops, progress.stopped_at, progress.because
    if until is not None and until.metric is not None:
        watched = watched.observed(values.get(until.metric), until.mode, until.min_delta)
        if stopped_at is None and watched.stale >= until.patience:
            stopped_at = step
            because = (
                f"{until.metric} has not improved on {watched.best} in {watched.stale} validations"
                if watched.best is not None
                else f"{until.metric} has no value in {watched.stale} validations"
            )
    if schedule.factory is None and schedule.name == "plateau":
        plateau = plateau.observed(values.get(schedule.metric), schedule.mode, schedule.min_delta)
        if plateau.stale > schedule.patience:
            drops, plateau = drops + 1, WatchedMetric(best=plateau.best)
    return RecipeProgress(
        step=step, until=watched, plateau=plateau, drops=drops, stopped_at=stopped_at, because=because
    )
