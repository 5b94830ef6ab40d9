"""The envelope around every message: who sent it, when, in which version, and as a consequence of what."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field, InstanceOf, StringConstraints

from schemas.base import LAST_TIME, Part, Time, Token


class EntityKind(StrEnum):
    """The kind of a sender: the draft's entities (§3), and the clients and tools around them."""

    SERVICE_REGISTRY = "service-registry"
    GATEWAY = "gateway"
    AUTHORIZER = "authorizer"
    ROUTER = "router"
    ORCHESTRATOR = "orchestrator"
    CLUSTER = "cluster"
    INSTANCE = "instance"
    FUNCTIONAL_MODULE = "functional-module"
    BROKER = "broker"
    ACCOUNTANT = "accountant"
    MODEL_REGISTRY = "model-registry"
    PROVISIONER = "provisioner"
    CLIENT = "client"
    TAP = "tap"


class Sender(Part):
    """The sender of a message. `name` survives a restart, `incarnation` does not."""

    name: Token
    kind: EntityKind
    incarnation: Token


def _by_a_sound_clock(at: float) -> float:
    return at if 0.0 <= at < LAST_TIME else 0.0  # a NaN is neither


# Almost every time is valid: only the others need a call of Python to be read.
SentAt = Annotated[
    Time | Annotated[float, AfterValidator(_by_a_sound_clock)], Field(union_mode="left_to_right")
]


class Envelope(Part):
    """The fields around a body on the wire.

    `id` is unique per sender incarnation. `causation` is the id of the message that this one answers or
    follows from. `correlation` names the request at the beginning (a gateway's or a client's) and is in every
    message that follows from it, on the wire only if there is one; `bus.wire.correlation` sets both.
    `sent_at` is seconds since the epoch by the sender's clock, for display and never for decisions; a time
    that no calendar supports is read as 0 and keeps no sender out of the mesh. `body` is validated once, by
    the receiver that knows its type.
    """

    type: str
    version: tuple[int, int]
    id: str
    causation: str | None = None
    correlation: Annotated[str, StringConstraints(max_length=64)] | None = None
    sender: Sender
    sent_at: SentAt
    body: InstanceOf[dict[str, Any]]
