"""Named tensors in, named tensors out: what `predict` services are asked, and answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.errors import ErrorReply
from schemas.marks import PRIVATE
from schemas.step import Member
from schemas.telemetry import SessionLoad

MOST_TENSORS = 64
MOST_PREDICT_BYTES = 4 << 20
"""Most bytes of all tensors of one request."""
MOST_PREDICTED_BYTES = 960 << 10
"""… and of its answer: nobody below the control plane gives answers above 1 MiB."""
MOST_OTHERS = 255
"""Most requests that travel with another one."""


class NamedTensor(Part):
    """A tensor of one request. `data`: its bytes, C order, little endian."""

    name: str = Field(max_length=120)
    dtype: str
    shape: tuple[int, ...] = Field(max_length=8)
    data: Annotated[bytes, PRIVATE]


class PredictItem(Part):
    """A request that travels with another one, to the same instances (ADR-0187)."""

    generation: Token
    inputs: tuple[NamedTensor, ...] = Field(max_length=MOST_TENSORS)
    embed: bool = False


class PredictedItem(Part):
    """What became of a request that travelled with another one; `error`: it has no outputs."""

    generation: Token
    outputs: tuple[NamedTensor, ...] = ()
    exact: bool = False
    inexact_because: str = ""
    error: ErrorReply | None = None


class Predict(Message, wire="serve.predict", version=(1, 1)):
    """MG → MI of stage 0: what does the model give for these? The first dimension counts samples."""

    job: Token
    generation: Token
    path: tuple[Member, ...]
    inputs: tuple[NamedTensor, ...] = Field(max_length=MOST_TENSORS)
    embed: bool = Field(
        False,
        description="`inputs` are `tokens` (1, tokens) int64; answer with one vector, named by what it is",
    )
    others: tuple[PredictItem, ...] = Field(
        (), max_length=MOST_OTHERS, description="further requests, each with an answer of its own (ADR-0187)"
    )


class Predicted(Message, wire="serve.predicted", version=(1, 1)):
    """The outputs; `exact`: their bits are independent of what was computed beside them; else
    `inexact_because`.
    """

    generation: Token
    outputs: tuple[NamedTensor, ...]
    exact: bool = False
    inexact_because: str = ""
    load: SessionLoad = SessionLoad()
    error: ErrorReply | None = Field(
        None, description="why there are no outputs, where others were asked with it"
    )
    others: tuple[PredictedItem, ...] = Field(
        (),
        max_length=MOST_OTHERS,
        description="of `others`, in their order; those that are missing are to be asked again, alone",
    )
