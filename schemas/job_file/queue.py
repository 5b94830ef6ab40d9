"""The section `queue`: when a job may start, and before whom."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from schemas.base import Part, Seconds, Token

MOST_YEARS_S = 10 * 366 * 86400.0
MOST_NOTICE_S = 3600.0
"""A job keeps others waiting no longer than that."""


Priority = Annotated[int, Field(ge=-1000, le=1000)]
Deadline = Annotated[Seconds, Field(gt=0, le=MOST_YEARS_S)] | None
After = Annotated[tuple[Token, ...], Field(max_length=64)]
WallTime = Annotated[Seconds, Field(gt=0, le=MOST_YEARS_S)] | None


class QueueSpec(Part):
    """What the queue has to know of a job beside its size. Other jobs are named by their ids."""

    priority: Priority = Field(
        0,
        description="its class: with the order `priority` higher ones come first, and may park lower ones",
    )
    deadline_s: Deadline = Field(
        None,
        description="seconds from its submission until it is to be done; near that it goes to the front of "
        "its class",
    )
    after: After = Field((), description="jobs and builds that have to be done before it starts")
    hold: bool = Field(False, description="it waits until a person resumes it")
    wall_time_s: WallTime = Field(
        None,
        description="seconds that it may run; then it is parked, until a person resumes it",
    )
    notice_s: Seconds = Field(
        0.0,
        le=MOST_NOTICE_S,
        description="seconds from the word that it parks for another job, a reservation or the end of its "
        "wall time until it does: it may end before",
    )
    apart: tuple[Token, ...] = Field((), max_length=64, description="jobs on whose nodes it must not start")
    beside: tuple[Token, ...] = Field(
        (), max_length=64, description="jobs: it starts only on nodes on which one of them runs"
    )

    @model_validator(mode="after")
    def _not_both(self) -> QueueSpec:
        if both := sorted(set(self.apart) & set(self.beside)):
            raise ValueError(f"apart and beside both name {', '.join(both)}: leave one out")
        return self
