"""Requests to a broker, and its answers (ADR-0031)."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message


class BrokerRequest(Message, wire="broker.request"):
    """MI, MIC, FM, client, user → broker: make this JetStream call for me, if I may.

    The answer is JetStream's own, to the caller's inbox. Nothing is passed on unchanged: the broker parses
    the call and builds a new one from what it has parsed.
    """

    call: str = Field(max_length=2_000, description="the subject that the call is published to")
    headers: dict[str, str] = Field({}, max_length=8)
    body: bytes = b""


class BrokerAnswer(Message, wire="broker.answer"):
    """JetStream's answer in its own form, without an envelope."""
