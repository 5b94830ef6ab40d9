"""What a gateway has answered for each version of a service: counts and loads, never content."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.telemetry import SessionLoad

FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
"""Upper bounds of the histogram of times to the first token, in seconds; one more bin has what is later."""
MOST_VERSIONS = 256
"""Versions in one message; those that changed least lately wait for the next one."""


class VersionFigures(Part):
    """A version as one gateway knows it; counts are since `ServiceFigures.since`.

    `requests` counts what is over, by how it ended: `ok`, `cancelled`, or the code of an error. A request
    that another gateway went on with is counted there.
    """

    service: Token
    version: Token
    job: Token
    requests: dict[str, int] = Field({}, description="requests that are over, by outcome")
    refused: int = Field(0, ge=0, description="of them, those that found no room or nobody")
    tokens: int = Field(0, ge=0, description="of answers, those of open ones too")
    prompt_tokens: int = Field(0, ge=0)
    first_token: tuple[int, ...] = Field((), description="answers by time to their first token")
    first_token_s: float = Field(0.0, ge=0, description="the sum of these times, seconds")
    sessions: int = Field(0, ge=0, description="answers under way")
    waiting: int = Field(0, ge=0, description="of them, those without a token yet")
    loads: dict[Token, SessionLoad] = Field({}, description="SID → what that instance said of itself last")


class ServiceFigures(Message, wire="telemetry.service"):
    """MG → SMO and dashboards: versions whose figures changed; each replaces its former one.

    While a version is asked nothing, nothing is said of it. A later `since`: the gateway began anew.
    """

    gateway: Token
    since: Time = Field(description="when this gateway began to count")
    versions: tuple[VersionFigures, ...] = Field(max_length=MOST_VERSIONS)
