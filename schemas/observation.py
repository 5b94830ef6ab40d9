"""Observations of outside systems for functional modules (draft §4.2, Figure 2: RPC and REST ingestion).

A fabric's monitoring, a data centre's sensors or an operator's script post them to a gateway, if permitted;
the gateway publishes them for the modules that subscribe.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat, StringConstraints

from schemas.base import Message, Part, Time, Token
from schemas.marks import HOLDS_USER_VALUES

Name = Annotated[str, StringConstraints(min_length=1, max_length=120)]
Text = Annotated[str, StringConstraints(max_length=400)]


class Observation(Message, wire="telemetry.observation"):
    """One record of one thing at one moment: `what` was seen of `about`, by `source`.

    A later observation with the same source, what and about replaces the earlier one in a policy's view.
    """

    source: Token = Field(description="who observed it: a system's name, one subject token")
    what: Name = Field(description="what was observed, for example link or rack-temperature")
    about: Name | None = Field(None, description="of what: an instance, a node, a link; none: the job")
    job: Token | None = Field(None, description="which job it concerns; none: all of them")
    values: dict[Name, FiniteFloat] = Field({}, max_length=64)
    labels: Annotated[dict[Name, Text], HOLDS_USER_VALUES] = Field({}, max_length=64)
    at: Time | None = Field(None, description="when it was observed, seconds since the epoch")
    user: str = Field("", description="whose token brought it in; the gateway sets it")


class ObservationBatch(Part):
    """The body of `POST /v1/observations`."""

    observations: tuple[Observation, ...] = Field(min_length=1, max_length=1000)
