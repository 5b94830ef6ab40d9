"""Several calls in one request: `POST /v1/aggregate`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from schemas.base import Part

MOST_CALLS = 16
CallPath = Literal["/v1/completions", "/v1/chat/completions", "/v1/predict", "/v1/embeddings"]
"""Paths that may be called within another request, each whole and not as a stream."""


class ServiceCall(Part):
    """One call: the path, and the body that it would have there."""

    id: str = Field("", max_length=200, description="comes back with its answer")
    path: CallPath
    body: dict[str, Any]


class CallsBody(Part):
    """`POST /v1/aggregate`: calls that are made at once, each with its own rights, limits and answer."""

    calls: Annotated[tuple[ServiceCall, ...], Field(min_length=1, max_length=MOST_CALLS)]
    wait_s: float = Field(60.0, gt=0, le=600, description="a call without an answer by then has status 504")


class CallAnswered(Part):
    """What one call would have been answered at its own path."""

    id: str = ""
    status: int
    body: dict[str, Any]


class CallsAnswered(Part):
    """The answers, in the order of the calls. `failed`: how many of them have a status of 400 or more."""

    answers: tuple[CallAnswered, ...]
    failed: int
