"""The learning rate as a pure function of the step: instances apply it, the orchestrator reports it."""

from __future__ import annotations

import math

from schemas.job_file.training import TrainingSpec


def learning_rate(step: int, training: TrainingSpec) -> float:
    """Linear warm-up over `warmup_steps`, then cosine to `final_fraction` of the peak at the last step.

    Args:
        step: number of the step, from 0.
        training: the job's training section.

    Returns:
        The rate for that step, in units of the optimizer.
    """
    peak = training.optimizer.lr
    warmup = training.schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    remaining = max(1, training.steps - warmup - 1)
    progress = min(1.0, (step - warmup) / remaining)
    floor = training.schedule.final_fraction
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
