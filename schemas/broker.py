"""What readers ask a broker for (ADR-0031)."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message


class BrokerRequest(Message, wire="broker.request"):
    """MI, MIC, FM, client, user → broker: make this call of JetStream for me, if I may.

    The answer is JetStream's own, to the asker's inbox. Nothing here is passed on as it is: the broker reads
    the call and makes another one of what it has read.
    """

    call: str = Field(max_length=2_000, description="the subject that the call is published to")
    headers: dict[str, str] = Field({}, max_length=8)
    body: bytes = b""


class BrokerAnswer(Message, wire="broker.answer"):
    """What JetStream says to it, in JetStream's own form: without an envelope."""
