"""The parts of `training` that say how weights are updated: optimizer and schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Part

MOST_STEPS = 1 << 40
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class OptimizerSpec(Part):
    name: Literal["adamw"] = "adamw"
    lr: float = Field(3e-3, gt=0, le=1e3, allow_inf_nan=False)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(1e-8, ge=1e-30, le=1, allow_inf_nan=False)  # a smaller value is 0 in fp32: 0 ÷ 0
    weight_decay: float = Field(0.01, ge=0, le=1e3, allow_inf_nan=False)


class ScheduleSpec(Part):
    """Linear warm-up, then cosine down to `final_fraction` of the peak rate at the last step."""

    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    final_fraction: float = Field(0.1, ge=0, le=1, allow_inf_nan=False)
