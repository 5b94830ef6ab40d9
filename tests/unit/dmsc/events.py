"""Job events as a gateway tells them, for the tests of what is made of them."""

from __future__ import annotations

from schemas.gateway_api import JobLoad
from schemas.job import JobEvent, JobRecord, JobSpec, JobState, LiveInstanceView, StepResult
from tests.entity_records import compute

JOB = "j1"


def record(steps: int = 4, state: JobState = JobState.QUEUED) -> JobRecord:
    spec = JobSpec.model_validate(
        {"name": "tiny", "model": {"factory": "a:b"}, "training": {"steps": steps}, "parallel": {"stages": 2}}
    )
    return JobRecord(job=JOB, spec=spec, state=state, submitted_at=1.0, changed_at=1.0)


def state(value: JobState, text: str = "") -> JobEvent:
    return JobEvent(job=JOB, kind="state", at=1.0, state=value, text=text)


def step(
    number: int, loss: float, shares: dict[str, int] | None = None, *, step_s: float = 0.5, steps: int = 4
) -> JobEvent:
    result = StepResult(
        step=number,
        loss=loss,
        gradient_norm=1.0,
        learning_rate=0.1,
        tokens=100,
        step_s=step_s,
        tokens_per_s=100 / step_s,
        shares=shares or {},
    )
    return JobEvent(job=JOB, kind="step", at=2.0 + number, result=result, total_steps=steps)


def instances(*views: tuple[str, int, str]) -> JobEvent:
    made = tuple(
        LiveInstanceView(
            sid=sid, role="stage" if stage >= 0 else "data", stage=stage, cluster="a", node="n", state=state
        )
        for sid, stage, state in views
    )
    return JobEvent(job=JOB, kind="instances", at=1.0, instances=made)


def load(*measured: tuple[str, float]) -> JobLoad:
    """What routers tell: (SID, milliseconds per microbatch)."""
    return JobLoad(job=JOB, entries=tuple(compute(sid, job=JOB, service_ms=ms) for sid, ms in measured))
