"""The learning rate as a pure function of the step: the orchestrator decides it and records it.

An order to apply a step carries the decided number, and instances apply that. Only where an orchestrator of
an earlier version leads, whose orders carry none, they compute it themselves.
"""

from __future__ import annotations

import math

from schemas.job_file.recipe import ScheduleSpec
from schemas.job_file.training import TrainingSpec

UNWARMED_TIMESCALE = 10_000
"""Of `inverse_sqrt` without a warm-up, in steps."""
CYCLE_START = 1 / 25
"""First factor of `one_cycle`, as in `torch.optim.lr_scheduler.OneCycleLR`."""
CYCLE_RISE = 0.3
"""Part of the steps in which `one_cycle` rises, if `warmup_steps` does not say it."""


def learning_rate(step: int, training: TrainingSpec, drops: int = 0) -> float:
    """The rate of a step: linear warm-up over `warmup_steps`, then the schedule's curve.

    Args:
        step: number of the step, from 0.
        training: the job's training section.
        drops: how often `plateau` has lowered the rate so far (`schemas.recipe_progress`).

    Returns:
        The rate for that step, in units of the optimizer.

    Raises:
        ValueError: The schedule is a function of the user's, which only instances call.
    """
    schedule, peak = training.schedule, training.optimizer.lr
    if schedule.factory is not None:
        raise ValueError(f"{schedule.factory} is called in instances only")
    if schedule.name == "one_cycle":
        return peak * _one_cycle(step, training.steps, schedule)
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    remaining = max(1, training.steps - warmup - 1)
    progress = min(1.0, (step - warmup) / remaining)
    floor = schedule.final_fraction
    match schedule.name:
        case "cosine":
            return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        case "linear":
            return peak * (floor + (1 - floor) * (1 - progress))
        case "polynomial":
            return peak * (floor + (1 - floor) * math.pow(1 - progress, schedule.power))
        case "wsd":
            return peak * _stable_then_decay(step, training.steps, schedule)
        case "inverse_sqrt":
            timescale = warmup or UNWARMED_TIMESCALE
            return peak * math.sqrt(timescale / (step - warmup + timescale))
        case "step":
            return peak * math.pow(schedule.factor, (step - warmup) // schedule.every)
        case "plateau":
            return peak * math.pow(schedule.factor, drops)
    return peak


def _stable_then_decay(step: int, steps: int, schedule: ScheduleSpec) -> float:
    decay = schedule.decay_steps or max(1, steps // 10)
    begins = max(schedule.warmup_steps, steps - decay)
    if step < begins:
        return 1.0
    progress = min(1.0, (step - begins + 1) / max(1, steps - begins))
    return schedule.final_fraction + (1 - schedule.final_fraction) * (1 - progress)


def _one_cycle(step: int, steps: int, schedule: ScheduleSpec) -> float:
    rise = schedule.warmup_steps or CYCLE_RISE * steps
    top, last = max(rise - 1, 0.0), max(steps - 1.0, 1.0)
    if step <= top:
        return _between(CYCLE_START, 1.0, step / top if top else 1.0)
    return _between(1.0, schedule.final_fraction, min(1.0, (step - top) / max(last - top, 1e-9)))


def _between(begin: float, end: float, progress: float) -> float:
    """From `begin` to `end` along half a cosine."""
    return end + (begin - end) / 2 * (1 + math.cos(math.pi * progress))
