"""The section `model`: what is trained, and its loss."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from schemas.base import Part
from schemas.callables import LOSSES, MODELS, misnamed
from schemas.marks import HOLDS_USER_VALUES


def _for_jobs(value: str) -> str:
    if reason := misnamed(value, MODELS):
        raise ValueError(reason)
    return value


Factory = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"), AfterValidator(_for_jobs)]
"""`module:callable` of the user's own code, importable on every node of the job, or one of `MODELS`."""


class ModelSpec(Part):
    """The model: `factory(**args)` returns an `nn.Module` or a `DeclaredGraph`.

    An `nn.Sequential` or `nn.ModuleList` is a sequence of layers; of any other module the forward pass is
    recorded, whose parameters take what bears their names in the batch.

    `loss` is `cross_entropy` (mean over all targets), a `module:callable` that takes outputs and names of the
    batch by the names of its parameters, or (output, targets), and returns a scalar mean or (sum, weight); or
    `model`, where the model itself returns it.
    """

    factory: Factory = Field(description="`module:callable` that returns the model")
    args: Annotated[dict[str, Any], HOLDS_USER_VALUES] = Field(
        {}, description="keyword arguments of the factory"
    )
    loss: str = Field(
        "cross_entropy", description="`cross_entropy`, `module:callable`, or `model`: the model returns it"
    )
    inputs: Annotated[dict[str, str], HOLDS_USER_VALUES] = Field(
        {},
        description="parameter of the model's forward pass → the name in the batch that it takes; `*`: the "
        "whole batch, as a dictionary",
    )
    freeze: tuple[str, ...] = Field(
        (), max_length=256, description="patterns of names of parameters that are not trained"
    )
    train: tuple[str, ...] = Field(
        (), max_length=256, description="patterns of names of the only parameters that are trained"
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None,
        description="of floating-point parameters, and of what the model takes; trained ones have an fp32 "
        "master then. By default they are as the factory makes them",
    )
    quantize: Literal["int8"] | None = Field(
        None, description="frozen weights of linear layers are kept as int8, with a scale for each row"
    )

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        if value not in ("cross_entropy", "model") and ":" not in value:
            raise ValueError("must be cross_entropy or module:callable, or model where the model returns it")
        if reason := misnamed(value, LOSSES):
            raise ValueError(reason)
        return value
