"""Texts in, vectors out: requests and answers of `/v1/embeddings`, in OpenAI's shape."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Part
from schemas.services.completion import ModelName, PromptTokens, ServedBy

MOST_INPUTS = 256
"""Most texts of one request."""


class EmbeddingsBody(Part):
    """`POST /v1/embeddings`. `input`: a text, tokens, or several of either."""

    model: ModelName = Field(description="a service, or one version of it: SERVICE@VERSION")
    input: (
        str
        | PromptTokens
        | Annotated[tuple[str | PromptTokens, ...], Field(min_length=1, max_length=MOST_INPUTS)]
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="`base64`: little-endian float32"
    )
    dimensions: int | None = Field(None, ge=1, description="only the model's own width")
    user: str | None = Field(None, max_length=200, description="whose requests go to one version; not logged")

    @property
    def inputs(self) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(self.input, str):
            return (self.input,)
        if all(isinstance(token, int) for token in self.input):
            return (self.input,)  # type: ignore[return-value]  # all of them are tokens
        return self.input  # type: ignore[return-value]  # none of them is one


class TextVector(Part):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: tuple[float, ...] | str


class VectorUsage(Part):
    prompt_tokens: int
    total_tokens: int


class TextVectors(Part):
    """The vectors, in the order of the inputs. `pooled`: what they are of the model's numbers."""

    object: Literal["list"] = "list"
    data: tuple[TextVector, ...]
    model: str
    usage: VectorUsage
    pooled: str
    dmsc: ServedBy
