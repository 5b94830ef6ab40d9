"""The parts of `training` that say how weights are updated: optimizer, schedule, averages, the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from schemas.base import Part, Token
from schemas.callables import METRICS, OPTIMIZERS, UNFIT_OPTIMIZERS, misnamed
from schemas.job_file.data import MOST_SETS
from schemas.marks import HOLDS_USER_VALUES

MOST_STEPS = 1 << 40
MOST_GROUPS = 256
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)]
Callable = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
OptimizerName = Literal["adamw", "adam", "sgd", "rmsprop", "adagrad", "adafactor", "lion", "muon"]

_OF_ADAMW = ("betas", "eps", "weight_decay")


def _optimizer(value: str) -> str:
    if reason := UNFIT_OPTIMIZERS.get(value):
        raise ValueError(f"{value} {reason}")
    if reason := misnamed(value, OPTIMIZERS):
        raise ValueError(reason)
    return value


def _users(value: str) -> str:
    if reason := misnamed(value):
        raise ValueError(reason)
    return value


OptimizerFactory = Annotated[Callable, AfterValidator(_optimizer)]
"""`module:callable` of the user's own code, or a class of `torch.optim`; it takes parameter groups."""
UserFunction = Annotated[Callable, AfterValidator(_users)]


class GroupSpec(Part):
    """Parameters with options of their own. A parameter belongs to the first group that matches it.

    `match` are patterns (`*`, `?`, `[…]`) of full parameter names; with `dims`, only parameters with so many
    dimensions belong to it. Further keys are options of the optimizer, as `args` are. The group's `lr`
    follows the schedule like the optimizer's own. `name` or `factory` give the group another optimizer.
    """

    match: tuple[str, ...] = Field((), description="patterns of full parameter names; one may stand alone")
    dims: tuple[Annotated[int, Field(ge=0, le=64)], ...] = Field(
        (), description="only parameters with so many dimensions; one number may stand alone"
    )
    lr: Rate | None = Field(None, description="peak learning rate of the group; none: that of the optimizer")
    name: OptimizerName | None = Field(None, description="another optimizer for the group")
    factory: OptimizerFactory | None = Field(
        None, description="another optimizer for the group, as `module:callable`"
    )
    args: Annotated[dict[str, Any], HOLDS_USER_VALUES] = Field({}, description="options of the optimizer")

    @model_validator(mode="before")
    @classmethod
    def _options(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        known = {key: each for key, each in value.items() if key in cls.model_fields}
        options = {key: each for key, each in value.items() if key not in cls.model_fields}
        for key in ("match", "dims"):
            if isinstance(known.get(key), str | int) and not isinstance(known[key], bool):
                known[key] = [known[key]]
        if options and isinstance(known.get("args", {}), Mapping):
            known["args"] = {**known.get("args", {}), **options}
        return known

    @model_validator(mode="after")
    def _matches_something(self) -> GroupSpec:
        if not self.match and not self.dims:
            raise ValueError("a group needs match (patterns of parameter names) or dims")
        if self.name is not None and self.factory is not None:
            raise ValueError("name and factory exclude each other: give one of them")
        return self


class OptimizerSpec(Part):
    """The optimizer, by `name`, or by `factory(groups, lr=…, **args)`, which returns one of torch's kind.

    `betas`, `eps` and `weight_decay` are AdamW's; of any other optimizer they are `args` like the rest.
    """

    name: OptimizerName = Field("adamw", description="one that is built in")
    lr: Rate = Field(3e-3, description="peak learning rate")
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.95), description="decay of the averages of gradients and of their squares"
    )
    eps: float = Field(
        1e-8, ge=1e-30, le=1, allow_inf_nan=False, description="added to the root of the average square"
    )  # a smaller value is 0 in fp32: 0 ÷ 0
    weight_decay: float = Field(
        0.01,
        ge=0,
        le=1e3,
        allow_inf_nan=False,
        description="a weight shrinks by this times the learning rate with each step",
    )
    factory: OptimizerFactory | None = Field(None, description="any other, as `module:callable`")
    args: Annotated[dict[str, Any], HOLDS_USER_VALUES] = Field(
        {}, description="options of any optimizer but adamw"
    )
    groups: tuple[GroupSpec, ...] = Field(
        (), max_length=MOST_GROUPS, description="parameters with options of their own"
    )

    @model_validator(mode="before")
    @classmethod
    def _options(cls, value: Any) -> Any:
        """Moves AdamW's options among the `args` of another optimizer."""
        if not isinstance(value, Mapping):
            return value
        if value.get("factory") is not None and "name" in value:
            raise ValueError("name and factory exclude each other: give one of them")
        args = value.get("args", {})
        if (value.get("name", "adamw") == "adamw" and value.get("factory") is None) or not isinstance(
            args, Mapping
        ):
            return value
        moved = {key: value[key] for key in _OF_ADAMW if key in value}
        return {
            **{key: each for key, each in value.items() if key not in _OF_ADAMW},
            "args": {**args, **moved},
        }

    @model_validator(mode="after")
    def _no_args_of_adamw(self) -> OptimizerSpec:
        if self.is_adamw and self.args:
            names = ", ".join(self.args)
            raise ValueError(
                f"adamw has no args ({names}): give betas, eps or weight_decay beside lr, "
                "or factory: torch.optim:AdamW for the rest"
            )
        return self

    @property
    def is_adamw(self) -> bool:
        """The fused AdamW, as every job had it before there were others."""
        return self.factory is None and self.name == "adamw"

    @model_serializer(mode="wrap")
    def _only_own(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what does not apply, so that reading it again moves nothing among the `args`."""
        body: dict[str, Any] = write(self)
        for key in ("factory", "args", "groups"):
            if not getattr(self, key):
                body.pop(key, None)
        if self.factory is not None:
            body.pop("name", None)
        if not self.is_adamw:
            for key in _OF_ADAMW:
                body.pop(key, None)
        return body


class ScheduleSpec(Part):
    """The learning rate over the steps: a linear warm-up, then a curve by `name`, or `factory(step, total)`.

    `cosine`, `linear` and `polynomial` (of `power`) fall to `final_fraction` of the peak rate at the last
    step; `wsd` is constant and falls linearly in the last `decay_steps`; `inverse_sqrt` falls with the root
    of the steps; `step` multiplies by `factor` each `every` steps; `plateau` does so after `patience`
    validations in which `metric` has not improved; `one_cycle` rises during `warmup_steps` from a 25th of the
    peak, and falls to `final_fraction`, both as cosines. A `factory` gives the factor of the peak rate.
    """

    name: Literal[
        "cosine",
        "constant",
        "linear",
        "polynomial",
        "inverse_sqrt",
        "wsd",
        "step",
        "one_cycle",
        "plateau",
    ] = Field("cosine", description="the curve")
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS, description="steps in which the rate rises")
    final_fraction: float = Field(
        0.1, ge=0, le=1, allow_inf_nan=False, description="of the peak rate, at the last step"
    )
    power: float = Field(1.0, gt=0, le=100, allow_inf_nan=False, description="of polynomial")
    decay_steps: Steps | None = Field(None, description="of wsd; none: a tenth of all steps")
    every: Steps = Field(1000, description="of step: steps between two multiplications by `factor`")
    factor: float = Field(0.1, gt=0, lt=1, allow_inf_nan=False, description="of step and plateau")
    metric: str = Field("loss", max_length=200, description="of plateau: what has to improve")
    mode: Literal["min", "max"] = Field(
        "min", description="of plateau: whether a small or a large value is good"
    )
    patience: int = Field(3, ge=0, le=MOST_STEPS, description="of plateau, in validations")
    min_delta: float = Field(
        0.0,
        ge=0,
        le=1e12,
        allow_inf_nan=False,
        description="of plateau: what changes by less has not improved",
    )
    factory: UserFunction | None = Field(
        None, description="any other curve: `module:callable` of (step, steps in all)"
    )

    @property
    def needs_total(self) -> bool:
        """Whether the curve depends on the number of steps."""
        named = self.name in ("cosine", "linear", "polynomial", "wsd", "one_cycle")
        return self.factory is None and named


class AverageSpec(Part):
    """Exponential moving average of the weights (EMA): shadow = decay · shadow + (1 − decay) · weights.

    It begins as a copy of the weights after step `start_step`. `validate` and `export` say whether
    validations are computed with it and whether it is what the job ends with.
    """

    decay: float = Field(
        0.999, ge=0, lt=1, allow_inf_nan=False, description="what stays of the average with each step"
    )
    start_step: int = Field(
        0, ge=0, le=MOST_STEPS, description="the average begins with the weights after this step"
    )
    use_in_validation: bool = Field(
        True, alias="validate", description="validations are computed with the average"
    )
    export: bool = Field(True, description="the job ends with the average")

    model_config = {"populate_by_name": True, "serialize_by_alias": True}


class UntilSpec(Part):
    """When training ends: what comes first, if several are given.

    `metric` ends it early: after `patience` validations in which it has not improved by more than
    `min_delta`. It is the name of a metric, `loss` among them, or `set/metric`.
    """

    steps: Steps | None = Field(None, description="the most steps")
    tokens: Annotated[int, Field(ge=1, le=1 << 60)] | None = Field(
        None, description="the most tokens (samples, where there are no tokens)"
    )
    epochs: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] | None = Field(
        None, description="the most passes over the data"
    )
    feed: bool = Field(
        False,
        description="ends with the last whole step of the feed that it is trained on, once it is closed",
    )
    metric: str | None = Field(None, max_length=200, description="ends it early: a metric, or `set/metric`")
    mode: Literal["min", "max"] = Field(
        "min", description="whether a small or a large value of the metric is good"
    )
    patience: int = Field(
        3, ge=1, le=MOST_STEPS, description="validations without an improvement that end it"
    )
    min_delta: float = Field(
        0.0, ge=0, le=1e12, allow_inf_nan=False, description="what changes by less has not improved"
    )

    @model_validator(mode="after")
    def _ends(self) -> UntilSpec:
        if not self.bounded and self.metric is None and not self.feed:
            raise ValueError("says no end: give steps, tokens, epochs, feed or metric")
        return self

    @property
    def bounded(self) -> bool:
        """Whether the number of steps is certain once the size of the data is known."""
        return any(each is not None for each in (self.steps, self.tokens, self.epochs))


class MeasuredSet(Part):
    """How many microbatches of an evaluation set of `data.validation` a validation has."""

    name: Token = Field(description="an evaluation set of `data.validation`")
    microbatches: int = Field(2, ge=1, le=1 << 20, description="microbatches of the set in each validation")


class ValidationSpec(Part):
    """Validations: how often, of what, measured how.

    `metrics` are `perplexity`, `accuracy`, `top5`, or `module:callable` of the user's, which takes the
    model's output and batch names by its parameters' names and returns {name: (sum, count)}.
    """

    every: int | None = Field(None, ge=0, le=MOST_STEPS, description="steps; none: validate_every")
    metrics: tuple[str, ...] = Field((), max_length=64, description="what is measured beside the loss")
    sets: tuple[MeasuredSet, ...] = Field(
        (), max_length=MOST_SETS, description="none: all of data, validation_microbatches of each"
    )

    @field_validator("metrics")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for metric in value:
            if ":" not in metric and metric not in METRICS:
                raise ValueError(f"{metric!r} is not one of {', '.join(sorted(METRICS))}, or module:callable")
            if ":" in metric and (reason := misnamed(metric)):
                raise ValueError(reason)
        return value

    @field_validator("sets")
    @classmethod
    def _distinct(cls, value: tuple[MeasuredSet, ...]) -> tuple[MeasuredSet, ...]:
        names = [each.name for each in value]
        if len(set(names)) < len(names):
            raise ValueError("two sets have the same name")
        return value
