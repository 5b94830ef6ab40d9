"""A job's curve, as a gateway gives it: figures of committed steps in columns, and validations."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Part, Token


class ValidationPoint(Part):
    """A validation of the weights after `step` steps."""

    step: int
    at: float
    loss: float
    metrics: dict[str, float] = Field({}, description="further metrics of the evaluation, by name")


class Interruption(Part):
    """A fault, a recovery, or a step that was left out. `step` is the last committed one before; -1: none."""

    at: float
    step: int
    kind: str
    text: str


class StepCurve(Part):
    """Committed steps in order: item i of each column is of step `steps[i]`, whose number counts from 0.

    A step that was rolled back and computed again is there once, as computed last. If the curve is longer
    than the asker wants, only every `stride`-th step is there, and the last one: of all jobs the same ones.
    """

    job: Token
    stride: int = 1
    first_kept: int = Field(0, description="the stream no longer has steps before this one")
    next: int = Field(description="`start` of a question that continues here")
    steps: tuple[int, ...] = ()
    at: tuple[float, ...] = Field((), description="when it was committed, seconds since the epoch")
    loss: tuple[float, ...] = ()
    gradient_norm: tuple[float, ...] = ()
    learning_rate: tuple[float, ...] = ()
    tokens_per_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    validations: tuple[ValidationPoint, ...] = ()
    interruptions: tuple[Interruption, ...] = Field((), description="the newest")
