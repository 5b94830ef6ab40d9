"""The section `training`: steps, samples, precision, validation, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from schemas.base import Part
from schemas.job_file.recipe import MOST_STEPS, OptimizerSpec, ScheduleSpec


def _interval(value: Any) -> Any:
    """Validate with one clear error line instead of one per member of the union."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value == "auto" or (is_number and 0 <= value <= MOST_STEPS):
        return value
    raise ValueError(f"does not fit; give auto, or a number of steps from 0 (none) to {MOST_STEPS:,}")


class TrainingSpec(Part):
    """A step is `microbatches` × `microbatch_samples` samples, whatever the number of workers."""

    steps: int = Field(ge=1, le=MOST_STEPS)
    microbatches: int = Field(8, ge=1, le=4096)
    microbatch_samples: int = Field(4, ge=1, le=1 << 20)
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    clip_norm: float | None = Field(1.0, gt=0, le=1e12, allow_inf_nan=False)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(0, ge=0, lt=1 << 63)
    compute_threads: int = Field(1, ge=1, le=1024, description="part of the job: it changes bits (DESIGN §5)")
    recompute: tuple[str, ...] = Field(
        (),
        max_length=256,
        description="patterns of names of layers whose activations are computed again in the backward pass, "
        "instead of kept",
    )
    exact_accumulation: bool = Field(
        True, description="int64 fixed-point gradient sums: bits independent of who did what"
    )
    on_bad_microbatch: Literal["stop", "skip"] = Field(
        "stop",
        description="what becomes of the job when a microbatch fails on two instances (user code raises, "
        "or loss or gradient is not finite): it fails, or the microbatch's whole step is left out",
    )
    validate_every: int = Field(
        0, ge=0, le=MOST_STEPS, description="steps between validations; 0: only at the end"
    )
    validation_microbatches: int = Field(2, ge=0, le=1 << 20)
    checkpoint_every: Annotated[
        Annotated[int, Field(ge=0, le=MOST_STEPS)] | Literal["auto"], BeforeValidator(_interval)
    ] = Field("auto", description="steps between checkpoints; 0: none; auto: by cost, failures and risk")
