"""Named tensors in, named tensors out: what `predict` services are asked, and answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from schemas.base import Message, Part, Token
from schemas.marks import PRIVATE
from schemas.step import Member
from schemas.telemetry import SessionLoad

MOST_TENSORS = 64
MOST_PREDICT_BYTES = 4 << 20
"""Most bytes of all tensors of one request."""
MOST_PREDICTED_BYTES = 960 << 10
"""… and of its answer: nobody below the control plane gives answers above 1 MiB."""


class NamedTensor(Part):
    """A tensor of one request. `data`: its bytes, C order, little endian."""

    name: str = Field(max_length=120)
    dtype: str
    shape: tuple[int, ...] = Field(max_length=8)
    data: Annotated[bytes, PRIVATE]


class Predict(Message, wire="serve.predict"):
    """MG → MI of stage 0: what does the model give for these? The first dimension counts samples."""

    job: Token
    generation: Token
    path: tuple[Member, ...]
    inputs: tuple[NamedTensor, ...] = Field(max_length=MOST_TENSORS)
    embed: bool = Field(
        False,
        description="`inputs` are `tokens` (1, tokens) int64; answer with one vector, named by what it is",
    )


class Predicted(Message, wire="serve.predicted"):
    """The outputs; `exact`: their bits are independent of what was computed beside them; else
    `inexact_because`.
    """

    generation: Token
    outputs: tuple[NamedTensor, ...]
    exact: bool = False
    inexact_because: str = ""
    load: SessionLoad = SessionLoad()
