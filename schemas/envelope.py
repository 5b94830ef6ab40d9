"""The envelope around every message: who said it, when, in which version, and because of what."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, InstanceOf, StringConstraints

from schemas.base import LAST_TIME, Part, Time, Token


class EntityKind(StrEnum):
    """What a sender is. The draft's entities (§3) and the people and tools around them."""

    SERVICE_REGISTRY = "service-registry"
    GATEWAY = "gateway"
    AUTHORIZER = "authorizer"
    ROUTER = "router"
    ORCHESTRATOR = "orchestrator"
    CLUSTER = "cluster"
    INSTANCE = "instance"
    FUNCTIONAL_MODULE = "functional-module"
    BROKER = "broker"
    CLIENT = "client"
    TAP = "tap"


class Sender(Part):
    """Who speaks. `name` survives a restart, `incarnation` does not."""

    name: Token
    kind: EntityKind
    incarnation: Token


def _by_a_sound_clock(at: float) -> float:
    return at if 0.0 <= at < LAST_TIME else 0.0  # a NaN is neither


# Almost every time is sound: only others need a call of Python to be read.
SentAt = Annotated[
    Time | Annotated[float, AfterValidator(_by_a_sound_clock)], Field(union_mode="left_to_right")
]


class Envelope(Part):
    """What stands around a body on the wire.

    `id` is unique per sender incarnation; `causation` is the id of the message that this one answers
    or follows from; `correlation` names the request that it all began with (a gateway's, a client's) and
    goes with everything that follows from it, on the wire only where there is one: `bus.wire.correlation`
    sets both. `sent_at` is seconds since the epoch by the sender's clock (for people, never for decisions):
    one that no calendar knows is read as 0, and keeps nobody out of the mesh. What is in `body` is looked at
    by whoever knows its type, and once.
    """

    type: str
    version: tuple[int, int]
    id: str
    causation: str | None = None
    correlation: Annotated[str, StringConstraints(max_length=64)] | None = None
    sender: Sender
    sent_at: SentAt
    body: InstanceOf[dict[str, Any]]
