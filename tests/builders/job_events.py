"""A job's events as a gateway tells them, and made-up streams of them."""

from __future__ import annotations

from schemas.gateway_api import JobLoad
from schemas.job import JobEvent, JobRecord, JobState, LiveInstanceView
from tests.builders.jobs import job, spec, state_event, step_event
from tests.builders.telemetry import compute

JOB = "j1"
MICROBATCHES = 4
"""A step, in streams."""


def record(steps: int = 4, state: JobState = JobState.QUEUED) -> JobRecord:
    return job(JOB, state, spec=spec(training={"steps": steps}, parallel={"stages": 2}))


def state(value: JobState, text: str = "") -> JobEvent:
    return state_event(value, job=JOB, at=1.0, text=text)


def step(
    number: int,
    loss: float = 1.0,
    shares: dict[str, int] | None = None,
    *,
    step_s: float = 0.5,
    steps: int = 4,
) -> JobEvent:
    return step_event(
        number, job=JOB, at=2.0 + number, total_steps=steps, loss=loss, step_s=step_s, shares=shares or {}
    )


def noticed(kind: str, text: str = "", at: float = 0.0) -> JobEvent:
    """A fault, a recovery, or another event that is a text."""
    return JobEvent.model_validate({"job": JOB, "kind": kind, "at": at, "text": text})


def instances(*views: tuple[str, int, str], standby: bool = False) -> JobEvent:
    found = tuple(
        LiveInstanceView(
            sid=sid,
            role="stage" if stage >= 0 else "data",
            stage=stage,
            cluster="a",
            node="n",
            state=state,
            standby=standby,
        )
        for sid, stage, state in views
    )
    return JobEvent(job=JOB, kind="instances", at=1.0, instances=found)


def load(*measured: tuple[str, float]) -> JobLoad:
    """What routers tell: (SID, milliseconds per microbatch)."""
    return JobLoad(job=JOB, entries=tuple(compute(sid, job=JOB, service_ms=ms) for sid, ms in measured))


CREW = ("j-s0-r0", "j-s0-r1", "j-s1-r0")
EVERYONE = instances((CREW[0], 0, "active"), (CREW[1], 0, "active"), (CREW[2], 1, "active"))


def committed(
    number: int, at: float, *, step_s: float = 1.0, shares: tuple[int, int, int] = (2, 2, 4)
) -> JobEvent:
    """A step as told at `at`; shares of stage 0's two replicas and of stage 1's one."""
    return step_event(number, job=JOB, at=at, step_s=step_s, shares=dict(zip(CREW, shares, strict=True)))


def clean(count: int, *, step_s: float = 1.0) -> list[JobEvent]:
    """A run without faults that begins at 0."""
    return [EVERYONE, *(committed(number, step_s * (number + 1), step_s=step_s) for number in range(count))]
