"""The section `model`: what is trained, and its loss."""

from __future__ import annotations

from typing import Annotated, Any

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
    """The model: `factory(**args)` yields an `nn.Sequential`/`ModuleList` style model.

    `loss` is `cross_entropy` (next-token, mean over all positions) or a `module:callable` taking
    (output, targets) and returning a scalar mean.
    """

    factory: Factory
    args: Annotated[dict[str, Any], HOLDS_USER_VALUES] = {}
    loss: str = "cross_entropy"

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        if value != "cross_entropy" and ":" not in value:
            raise ValueError("must be cross_entropy or module:callable")
        if reason := misnamed(value, LOSSES):
            raise ValueError(reason)
        return value
