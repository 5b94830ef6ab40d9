"""How the microbatches of a validation are numbered over its sets. Pure; the same for all who ask.

A validation has microbatches 0 … n-1, as a step has. They are the microbatches of the first set, then those
of the second, and so on.
"""

from __future__ import annotations

from schemas.job import JobSpec


def evaluation_sets(spec: JobSpec) -> list[tuple[str, int]]:
    """(name, microbatches) of each set of a validation, in order; none: nothing is held out."""
    training = spec.training
    if training.evaluation.sets:
        return [(each.name, each.microbatches) for each in training.evaluation.sets]
    return [(name, training.validation_microbatches) for name in spec.data.evaluation_sets]


def evaluation_microbatches(spec: JobSpec) -> list[tuple[str, int]]:
    """For each microbatch of a validation: the name of its set, and its number within the set."""
    return [(name, number) for name, count in evaluation_sets(spec) for number in range(count)]


def evaluation_microbatch(spec: JobSpec, microbatch: int) -> tuple[str, int]:
    """The same for one microbatch, without the list.

    Raises:
        ValueError: There is no such microbatch.
    """
    rest = microbatch
    for name, count in evaluation_sets(spec):
        if 0 <= rest < count:
            return name, rest
        rest -= count
    raise ValueError(f"a validation of this job has no microbatch {microbatch}")
