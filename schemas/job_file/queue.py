"""The section `queue`: when a job may start, and before whom."""

from __future__ import annotations

from pydantic import Field, model_validator

from schemas.base import Part, Seconds, Token

MOST_YEARS_S = 10 * 366 * 86400.0
MOST_NOTICE_S = 3600.0
"""A job keeps others waiting no longer than that."""


class QueueSpec(Part):
    """What the queue has to know of a job beside its size. Other jobs are named by their ids."""

    priority: int = Field(
        0,
        ge=-1000,
        le=1000,
        description="its class: with the order `priority` higher ones come first, and may park lower ones",
    )
    deadline_s: Seconds | None = Field(
        None,
        gt=0,
        le=MOST_YEARS_S,
        description="seconds from its submission until it is to be done; near that it goes to the front of "
        "its class",
    )
    after: tuple[Token, ...] = Field(
        (), max_length=64, description="jobs that have to be done before it starts"
    )
    hold: bool = Field(False, description="it waits until a person resumes it")
    wall_time_s: Seconds | None = Field(
        None,
        gt=0,
        le=MOST_YEARS_S,
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
