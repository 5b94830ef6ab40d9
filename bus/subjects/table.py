"""The function `row` and the names with which the tables of subjects are written."""

from __future__ import annotations

from typing import overload

from bus.subject import ANSWER_BYTES, Delivery, Names, Reply, Request, Subject
from schemas.base import Message
from schemas.envelope import EntityKind as K

RECORDS_BYTES = 8 << 20
"""Most bytes of an answer with whole records of the control plane: as many as a message may have."""
STEP_BYTES = 2 << 20
"""Most bytes of an account of a step: 4,096 microbatches fit, with long names."""

SRD, MG, AAM, SR, SMO, MIC, MI, FM, CLIENT, BROKER = (
    (K.SERVICE_REGISTRY,),
    (K.GATEWAY,),
    (K.AUTHORIZER,),
    (K.ROUTER,),
    (K.ORCHESTRATOR,),
    (K.CLUSTER,),
    (K.INSTANCE,),
    (K.FUNCTIONAL_MODULE,),
    (K.CLIENT,),
    (K.BROKER,),
)
ALL = tuple(K)
CORE, REQUEST, STREAM, KV = Delivery.CORE, Delivery.REQUEST, Delivery.STREAM, Delivery.KEY_VALUE


@overload
def row(
    name: str,
    pattern: str,
    schema: type[Request],
    senders: tuple[K, ...],
    receivers: tuple[K, ...],
    delivery: Delivery,
    about: str,
    *,
    reply: type[Reply],
    stream: str | None = None,
    bucket: str | None = None,
    names: Names | None = None,
    answer_bytes: int = ANSWER_BYTES,
) -> Subject[Request, Reply]: ...


@overload
def row(
    name: str,
    pattern: str,
    schema: type[Request],
    senders: tuple[K, ...],
    receivers: tuple[K, ...],
    delivery: Delivery,
    about: str,
    *,
    reply: type[Message],
    other_replies: tuple[type[Message], ...],
    stream: str | None = None,
    bucket: str | None = None,
    names: Names | None = None,
    answer_bytes: int = ANSWER_BYTES,
) -> Subject[Request, Message]: ...


@overload
def row(
    name: str,
    pattern: str,
    schema: type[Request],
    senders: tuple[K, ...],
    receivers: tuple[K, ...],
    delivery: Delivery,
    about: str,
    *,
    stream: str | None = None,
    bucket: str | None = None,
    names: Names | None = None,
) -> Subject[Request, Message]: ...


def row(
    name: str,
    pattern: str,
    schema: type[Message],
    senders: tuple[K, ...],
    receivers: tuple[K, ...],
    delivery: Delivery,
    about: str,
    *,
    reply: type[Message] | None = None,
    other_replies: tuple[type[Message], ...] = (),
    stream: str | None = None,
    bucket: str | None = None,
    names: Names | None = None,
    answer_bytes: int = ANSWER_BYTES,
) -> Subject:
    """One row of the table; see `Subject`."""
    return Subject(
        name,
        pattern,
        schema,
        frozenset(senders),
        frozenset(receivers),
        delivery,
        about,
        reply,
        stream,
        bucket,
        names,
        answer_bytes,
        other_replies,
    )
