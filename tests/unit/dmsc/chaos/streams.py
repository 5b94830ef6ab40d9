"""Made-up event streams of a job of two stages, four microbatches a step."""

from __future__ import annotations

from schemas.job import JobEvent, StepResult
from tests.unit.dmsc.events import JOB, instances

MICROBATCHES = 4
EVERYONE = instances(("j-s0-r0", 0, "active"), ("j-s0-r1", 0, "active"), ("j-s1-r0", 1, "active"))


def step(
    number: int, at: float, *, step_s: float = 1.0, shares: tuple[int, int, int] = (2, 2, 4)
) -> JobEvent:
    """A step event as told at `at`; shares of stage 0's two replicas and of stage 1's one."""
    result = StepResult(
        step=number,
        loss=1.0,
        gradient_norm=1.0,
        learning_rate=0.1,
        tokens=100,
        step_s=step_s,
        tokens_per_s=100 / step_s,
        shares=dict(zip(("j-s0-r0", "j-s0-r1", "j-s1-r0"), shares, strict=True)),
    )
    return JobEvent(job=JOB, kind="step", at=at, result=result)


def told(kind: str, text: str = "", at: float = 0.0) -> JobEvent:
    """A fault or a recovery."""
    return JobEvent.model_validate({"job": JOB, "kind": kind, "at": at, "text": text})


def clean(count: int, *, step_s: float = 1.0) -> list[JobEvent]:
    """A run without faults that begins at 0."""
    return [EVERYONE, *(step(number, step_s * (number + 1), step_s=step_s) for number in range(count))]
