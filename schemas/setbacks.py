"""What has gone wrong in a job so far, as its record keeps it for whoever goes on with it."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Part, Time, Token


class MicrobatchFault(Part):
    """A microbatch at which instances ended themselves; after two incarnations it is quarantined."""

    step: int
    microbatch: int
    stage: int
    reason: str = Field(description="what the last one said")
    ended: dict[str, str] = Field(description="incarnation → SID of each instance that ended at it")


class StepSetbacks(Part):
    """The failures of a step that is not committed yet."""

    step: int
    attempts: int = Field(description="attempts of it that failed so far")
    errors: tuple[tuple[int | None, str], ...] = Field((), description="(stage, code) of errors of its own")


class CodeFailure(Part):
    """An instance ended for an exception of the job's own code, at a step."""

    at: Time
    step: int
    sid: Token
