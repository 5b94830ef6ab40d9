"""What is submitted, what the orchestrator keeps of it, and what its steps came to."""

from __future__ import annotations

from typing import Any

from schemas.job import JobEvent, JobRecord, JobSpec, JobState, StepResult
from schemas.job_file.model import ModelSpec


def document(**more: Any) -> dict[str, Any]:
    """The smallest job, as a file has it."""
    return {"name": "tiny", "model": {"factory": "models:build"}, "training": {"steps": 2}} | more


def spec(**more: Any) -> JobSpec:
    """The smallest job."""
    return JobSpec.model_validate(document(**more))


def gpt(**arguments: Any) -> dict[str, Any]:
    """A job file's model: a GPT of bytes that is built in a moment."""
    sizes = {"layers": 2, "width": 16, "heads": 2, "context": 8}
    return {"factory": "workers.models.gpt:byte_gpt", "args": sizes | arguments}


def gpt_model(**arguments: Any) -> ModelSpec:
    return ModelSpec.model_validate(gpt(**arguments))


def job(job_id: str = "tiny-1", state: JobState = JobState.RUNNING, **more: Any) -> JobRecord:
    """The orchestrator's record of a job."""
    fields: dict[str, Any] = {"spec": spec(), "submitted_at": 1.0, "changed_at": 1.0} | more
    return JobRecord(job=job_id, state=state, **fields)


def step_result(step: int = 0, **more: Any) -> StepResult:
    """A committed step of 100 tokens in a second."""
    fields: dict[str, Any] = {
        "loss": 1.0,
        "gradient_norm": 1.0,
        "learning_rate": 0.1,
        "tokens": 100,
        "step_s": 1.0,
    } | more
    return StepResult(step=step, **{"tokens_per_s": fields["tokens"] / fields["step_s"]} | fields)


def step_event(
    step: int = 0, *, job: str = "j", at: float = 0.0, total_steps: int = 0, **result: Any
) -> JobEvent:
    """A committed step, as the orchestrator tells of it."""
    return JobEvent(job=job, kind="step", at=at, total_steps=total_steps, result=step_result(step, **result))


def state_event(state: JobState, *, job: str = "j", at: float = 0.0, **more: Any) -> JobEvent:
    return JobEvent(job=job, kind="state", at=at, state=state, **more)
