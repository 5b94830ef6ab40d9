"""How several answers to one request become one: what a request, or a version's file, says about it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from schemas.base import Part, Token

MOST_ASKED = 16
"""Most versions or replicas that one request asks."""
How = Literal["first", "vote", "weighted", "attention"]


class Aggregation(Part):
    """Who is asked, and what their answers amount to. Short: `first`, `vote`, `weighted`, `attention`."""

    how: How = Field(
        description="`first`: the earliest answer; `vote`: the choice with most weight; `weighted`: the mean "
        "of distributions by weight; `attention`: the same, and who is surer counts more"
    )
    over: (
        Literal["replicas", "versions"]
        | Annotated[tuple[Token, ...], Field(min_length=1, max_length=MOST_ASKED)]
    ) = Field("versions", description="who is asked; names: these versions; not given: `first` asks replicas")
    min_voters: int = Field(1, ge=1, le=MOST_ASKED, description="fewest answers")
    wait_s: float = Field(
        10.0, gt=0, le=60, description="seconds for which answers are waited for; `first` waits for its own"
    )
    temperature: float = Field(1.0, gt=0, le=1000, description="τ of `attention`, nats")
    extract: Literal["whole_text", "last_number"] = Field(
        "whole_text", description="what of a text is a vote"
    )
    output: str | None = Field(
        None, max_length=120, description="output that is a distribution; not given: the first"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_name(cls, value: Any) -> Any:
        value = {"how": value} if isinstance(value, str) else value
        if isinstance(value, dict) and value.get("how") == "first" and value.get("over") is None:
            return {**value, "over": "replicas"}
        return value

    @model_validator(mode="after")
    def _one_is_enough(self) -> Aggregation:
        if self.how == "first" and self.min_voters > 1:
            raise ValueError("min_voters: `first` is one answer; leave it out, or have versions vote")
        return self


class AggregatedBy(Part):
    """Whose answers are in one, and who was asked in vain. `shares`: each one's part; the sum is 1."""

    how: How
    answered_by: tuple[str, ...]
    missing: tuple[str, ...] = ()
    shares: dict[str, float] = {}
