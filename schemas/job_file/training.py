"""The section `training`: steps, samples, precision, validation, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from schemas.base import Part
from schemas.job_file.recipe import (
    MOST_STEPS,
    AverageSpec,
    OptimizerSpec,
    ScheduleSpec,
    UntilSpec,
    ValidationSpec,
)

ASYNCHRONOUS = (
    "updates are synchronous here: an asynchronous update is computed from weights that other workers have "
    "changed meanwhile, so that the weights would depend on who was fast and who died; for speed give more "
    "microbatches (they are routed by load), or more replicas"
)
"""Why asynchronous updates are refused."""


def _interval(value: Any) -> Any:
    """Validate with one clear error line instead of one per member of the union."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if value == "auto" or (is_number and 0 <= value <= MOST_STEPS):
        return value
    raise ValueError(f"does not fit; give auto, or a number of steps from 0 (none) to {MOST_STEPS:,}")


def synchronous(value: bool) -> bool:
    """Refuses asynchronous updates, with the reason."""
    if value:
        raise ValueError(ASYNCHRONOUS)
    return value


class LossScaleSpec(Part):
    """Of dynamic loss scaling; the names are those of `torch.amp.GradScaler`.

    The loss is multiplied by the scale, a power of two, and gradients are divided by it. A step that is left
    out halves it, `growth_interval` applied steps in a row double it.
    """

    init_scale: float = Field(
        65536.0, ge=2.0**-16, le=2.0**64, allow_inf_nan=False, description="a power of two"
    )
    growth_interval: int = Field(
        2000, ge=0, le=MOST_STEPS, description="applied steps in a row that double it; 0: it never grows"
    )

    @field_validator("init_scale")
    @classmethod
    def _exact(cls, value: float) -> float:
        if math.frexp(value)[0] != 0.5:
            raise ValueError("must be a power of two, such as 65536, so that scaling rounds nothing")
        return value


Synchronous = Annotated[bool, AfterValidator(synchronous)]


MOST_MICROBATCHES = 4096
MOST_STEP_SAMPLES = 1 << 32
Auto = Literal["microbatch_samples", "recompute"]
"""Keys of `training` that may say `auto`."""


def samples_that_divide(step_samples: int) -> list[int]:
    """The powers of two that a microbatch of a step of so many samples may have, rising."""
    most = step_samples & -step_samples
    return [1 << power for power in range(most.bit_length()) if step_samples >> power <= MOST_MICROBATCHES]


def or_words(*words: str) -> Callable[[dict[str, Any]], None]:
    """For the JSON Schema of a field that may say one of these words, too."""

    def extended(schema: dict[str, Any]) -> None:
        about = ("title", "description", "default")
        own = {key: schema.pop(key) for key in [*schema] if key not in about}
        forms = own.pop("oneOf", None)  # of a union that knows by itself which form a value has
        schema["anyOf"] = [*([own] if forms is None else forms), {"enum": [*words]}]

    return extended


class TrainingSpec(Part):
    """A step is `microbatches` × `microbatch_samples` samples, whatever the number of workers."""

    steps: int = Field(
        ge=1, le=MOST_STEPS, description="the most steps; `until` may give them, or end sooner"
    )
    until: UntilSpec | None = None
    microbatches: int = Field(8, ge=1, le=MOST_MICROBATCHES, description="microbatches of a step")
    microbatch_samples: int = Field(
        4,
        ge=1,
        le=1 << 20,
        json_schema_extra=or_words("auto"),
        description="samples of a microbatch; auto: of the powers of two that divide step_samples, the most "
        "that memory holds",
    )
    step_samples: int | None = Field(
        None,
        ge=1,
        le=MOST_STEP_SAMPLES,
        description="in place of microbatches: they are step_samples / microbatch_samples",
    )
    auto: tuple[Auto, ...] = Field(
        (), description="which of these keys say `auto`, until they are fixed: before step 0, by memory"
    )
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    ema: AverageSpec | None = None
    clip_norm: float | None = Field(
        1.0,
        gt=0,
        le=1e12,
        allow_inf_nan=False,
        description="most norm of the whole gradient; null: it is not clipped",
    )
    clip_value: float | None = Field(
        None,
        gt=0,
        le=1e12,
        allow_inf_nan=False,
        description="most of each gradient's absolute value, after clip_norm",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="bf16 and fp16: layers run under autocast; parameters stay as they are"
    )
    loss_scale: LossScaleSpec | None = Field(
        None, description="how gradients in fp16 are kept from vanishing; there by default where fp16 is used"
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="of initial weights, order of samples and dropout")
    compute_threads: int = Field(1, ge=1, le=1024, description="part of the job: it changes bits (DESIGN §5)")
    recompute: tuple[str, ...] = Field(
        (),
        max_length=256,
        json_schema_extra=or_words("none", "all", "auto"),
        description="patterns of names of layers whose activations are computed again in the backward pass, "
        "instead of kept; or none, all, or auto: those that memory asks for",
    )
    compile: tuple[str, ...] = Field(
        (),
        max_length=256,
        json_schema_extra=or_words("none", "all"),
        description="patterns of names of layers that torch's compiler compiles, for static shapes; or none, "
        "or all. It changes bits",
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
    validation_microbatches: int = Field(
        2, ge=0, le=1 << 20, description="microbatches of each evaluation set in a validation; 0: none"
    )
    evaluation: ValidationSpec = ValidationSpec()
    asynchronous: Synchronous = Field(False, description="refused: weights would depend on who was fast")
    checkpoint_every: Annotated[
        Annotated[int, Field(ge=0, le=MOST_STEPS)] | Literal["auto"], BeforeValidator(_interval)
    ] = Field("auto", description="steps between checkpoints; 0: none; auto: by cost, failures and risk")

    @model_validator(mode="before")
    @classmethod
    def _steps_of_until(cls, value: Any) -> Any:
        """`until` may stand for `steps`; what it says in tokens or epochs is known after the analysis."""
        if not isinstance(value, Mapping) or not isinstance(until := value.get("until"), Mapping):
            return value
        steps, most = value.get("steps"), until.get("steps")
        if not isinstance(most, int) or not 1 <= most <= MOST_STEPS:
            most = None  # whatever is wrong with it is said there
        if steps is None:
            return {**value, "steps": MOST_STEPS if most is None else most}
        if most is not None and isinstance(steps, int):
            return {**value, "steps": min(steps, most)}
        return value

    @model_validator(mode="before")
    @classmethod
    def _words_for_values(cls, value: Any) -> Any:
        """`auto`, `none` and `all`, and the microbatches of `step_samples`."""
        if not isinstance(value, Mapping):
            return value
        given = dict(value)
        auto: list[str] = [*given["auto"]] if isinstance(given.get("auto"), list | tuple) else []
        words: dict[str, tuple[str, ...]] = {"none": (), "all": ("*",)}
        for key, more in (("recompute", {"auto": ()}), ("compile", {})):
            if not isinstance(word := given.get(key), str):
                continue
            if word not in words | more:
                names = ", ".join(words | more)
                raise ValueError(f"{key}: {word} is no list of patterns; give one, or one of {names}")
            given[key] = (words | more)[word]
            auto += [key] if word == "auto" else []
        whole = given.get("step_samples")
        if not isinstance(whole, int) or not 1 <= whole <= MOST_STEP_SAMPLES:
            whole = None  # whatever is wrong with it is said there
        if given.get("microbatch_samples") == "auto":
            if "microbatches" in given or whole is None:
                raise ValueError(
                    "microbatch_samples: auto divides the samples of a step: give step_samples in place of "
                    "microbatches"
                )
            fitting = samples_that_divide(whole)
            if not fitting:
                raise ValueError(
                    f"step_samples: {whole} would be more than {MOST_MICROBATCHES} microbatches of the "
                    "largest power of two that divides it; give a multiple of a larger one"
                )
            given["microbatch_samples"] = fitting[0]
            auto.append("microbatch_samples")
        samples = given.get("microbatch_samples", 4)
        if whole is not None and isinstance(samples, int) and samples > 0:
            if whole % samples:
                raise ValueError(f"step_samples: {whole} is no multiple of microbatch_samples {samples}")
            if given.setdefault("microbatches", whole // samples) != whole // samples:
                raise ValueError(
                    f"step_samples: {whole} is {whole // samples} microbatches of {samples}, not "
                    f"{given['microbatches']}: leave microbatches out"
                )
        return {**given, "auto": tuple(dict.fromkeys(auto))} if auto else given

    @model_validator(mode="after")
    def _has_what_it_watches(self) -> TrainingSpec:
        until, schedule = self.until, self.schedule
        for place, metric in self.watched:
            if not self.evaluate_every:
                raise ValueError(f"{place} watches {metric}, but nothing validates: give evaluation.every")
        if schedule.needs_total and self.steps == MOST_STEPS and until is not None and not until.bounded:
            raise ValueError(
                f"schedule {schedule.name} needs the number of steps: give steps (the most), or a schedule "
                "without an end, such as name: constant"
            )
        return self

    @property
    def watched(self) -> tuple[tuple[str, str], ...]:
        """(place in this section, metric) of what validations decide: training's end, the learning rate."""
        until, schedule = self.until, self.schedule
        end = () if until is None or until.metric is None else (("until.metric", until.metric),)
        plateau = schedule.factory is None and schedule.name == "plateau"
        return (*end, ("schedule plateau", schedule.metric)) if plateau else end

    @property
    def evaluate_every(self) -> int:
        """Steps between validations; 0: only at the end."""
        return self.validate_every if self.evaluation.every is None else self.evaluation.every


class SampleSpec(Part):
    """A short text that the trained model generates at the end (byte-level language models only)."""

    prompt: str = Field("def ", description="how the text begins")
    tokens: int = Field(160, ge=0, le=4096, description="tokens that are generated")
    temperature: float = Field(
        0.8, ge=0, le=1e3, allow_inf_nan=False, description="0: always the likeliest token"
    )
