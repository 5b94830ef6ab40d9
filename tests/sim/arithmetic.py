"""What a run computes: integers that depend on every input, and what they are when nothing ever happens."""

from __future__ import annotations

from collections.abc import Iterable

WRAP = 1 << 64


def mix(*values: int) -> int:
    """A number that depends on all of `values` and their order."""
    total = 0x9E3779B97F4A7C15
    for value in values:
        total = (total ^ value) * 0xBF58476D1CE4E5B9 % WRAP
        total ^= total >> 29
    return total


def reference(stages: int, microbatches: int, steps: int, tied: Iterable[tuple[int, ...]] = ()) -> list[int]:
    """The weights after a run in which nothing ever happens, one number per stage.

    `tied`: groups of stages of which each takes the sum over all.
    """
    weights = [mix(stage, 1) for stage in range(stages)]
    for step in range(steps):
        sums = [0] * stages
        for number in range(microbatches):
            inputs = [mix(step, number)]
            for stage in range(stages):
                inputs.append(mix(inputs[-1], weights[stage]))
            gradient = 0
            for stage in reversed(range(stages)):
                sums[stage] = (sums[stage] + mix(inputs[stage], gradient, weights[stage], 3)) % WRAP
                gradient = mix(inputs[stage], gradient, weights[stage], 4)
        for group in tied:
            total = sum(sums[stage] for stage in group) % WRAP
            sums = [total if stage in group else own for stage, own in enumerate(sums)]
        weights = [mix(weight, total) for weight, total in zip(weights, sums, strict=True)]
    return weights


class Violation(AssertionError):
    """An invariant of the step transaction does not hold."""
