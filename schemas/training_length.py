"""How many steps a job has: what `training.until` says in tokens or epochs, once the data's size is known."""

from __future__ import annotations

import math

from schemas.errors import BadJob
from schemas.job import ENDED, JobSpec
from schemas.job_file.recipe import MOST_STEPS


def length_text(steps: int) -> str:
    """A job's number of steps as people read it; `–`: it has none, and ends with its feed or by a metric."""
    return str(steps) if steps < MOST_STEPS else "–"


def progress_text(done: int, steps: int, state: str) -> str:
    """How far a job is, as people read it: `5/100`; without a number of steps `5/–`, and `5` at its end."""
    if steps >= MOST_STEPS and state in ENDED:
        return str(done)
    return f"{done}/{length_text(steps)}"


def with_steps(spec: JobSpec, data_samples: int) -> JobSpec:
    """The job with `training.steps` as its `until` has it; twice is fine.

    Args:
        spec: The job.
        data_samples: Samples of one epoch; 0: not known.

    Raises:
        BadJob: `until.epochs` needs the size of data that has none, or the warm-up is longer than that.
    """
    training, until = spec.training, spec.training.until
    if until is None:
        return spec
    steps = training.steps
    samples = training.microbatches * training.microbatch_samples
    if until.tokens is not None:
        steps = min(steps, math.ceil(until.tokens / (samples * spec.data.tokens_per_sample)))
    if until.epochs is not None:
        if not data_samples:
            raise BadJob("training.until.epochs: the size of these data is not known; give steps or tokens")
        steps = min(steps, math.ceil(until.epochs * data_samples / samples))
    steps = min(max(1, steps), MOST_STEPS)
    if training.schedule.warmup_steps > steps:
        raise BadJob(
            f"training.schedule.warmup_steps: {training.schedule.warmup_steps} exceeds the {steps} steps "
            "that training.until comes to"
        )
    return spec.model_copy(update={"training": training.model_copy(update={"steps": steps})})


def samples_of(spec: JobSpec, epoch_samples: int, data_tokens: int) -> int:
    """Samples of one epoch; of windows from anywhere (0), as many as would cover what is not held out."""
    if epoch_samples:
        return epoch_samples
    kept = data_tokens * (1 - spec.data.held_out)
    return int(kept) // spec.data.tokens_per_sample
