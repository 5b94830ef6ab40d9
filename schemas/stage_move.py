"""The move of an instance to another stage: its forecast and its effect. All times are in seconds."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from schemas.base import Part, Token


class MoveForecast(Part):
    """The forecast of a move. The gain covers the remaining steps, before subtracting the cost."""

    step_before_s: float = Field(gt=0, allow_inf_nan=False, description="a step now, as measured")
    step_after_s: float = Field(gt=0, allow_inf_nan=False, description="a step once the newcomer works")
    cost_s: float = Field(
        ge=0, allow_inf_nan=False, description="as if training stood still while the instance moves"
    )
    gain_s: float = Field(allow_inf_nan=False)
    steps_left: int = Field(ge=0)

    @property
    def improvement(self) -> float:
        """The saved share of a step's time."""
        return 1.0 - self.step_after_s / self.step_before_s


class MoveState(StrEnum):
    MOVING = "moving"  # has left one stage and does not work in the other yet
    JOINED = "joined"  # works there; its effect is being measured
    BETTER = "better"  # steps are shorter than before
    NO_BETTER = "no_better"  # steps are not shorter: it is not tried again
    FAILED = "failed"  # it could not be started there and went back: it is not tried again
    UNDONE = "undone"  # something else changed the members before its effect was known


OPEN_MOVES = frozenset({MoveState.MOVING, MoveState.JOINED})
"""States of a move whose effect is not known yet; a job has at most one such move."""


class StageMove(Part):
    """One move, in a job's record and in its events of kind `rebalancing`."""

    sid: Token = Field(description="the instance that left")
    newcomer: Token = Field(description="what its slot hosts instead")
    from_stage: int
    to_stage: int
    step: int = Field(description="the first step without the one that left")
    by: str = Field(description="module or user who wanted it")
    forecast: MoveForecast | None = Field(None, description="None: ordered by hand")
    state: MoveState = MoveState.MOVING
    before_s: float | None = Field(None, description="a step before it, median of the last ones")
    cost_s: float | None = Field(None, description="time lost until the newcomer worked, as measured")
    after_s: float | None = Field(None, description="a step after it, median")
