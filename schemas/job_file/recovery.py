"""The section `recovery`: how often a job's own code may fail before a person has to look at it."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Part, Seconds


class RecoverySpec(Part):
    """A budget for exceptions of the job's own code. Kills, lost nodes and broken links never count."""

    max_recoveries: int | None = Field(
        20,
        ge=0,
        le=1_000_000,
        description="recoveries from exceptions of the job's own code within `within_s`; with one more the "
        "job is parked; null: any number",
    )
    within_s: Seconds = Field(3600.0, gt=0, description="seconds that such a recovery counts for")
