"""Envelopes of messages that a test hands to a service itself."""

from __future__ import annotations

from schemas.envelope import EntityKind, Envelope, Sender


def envelope(
    kind: EntityKind = EntityKind.GATEWAY, name: str = "gateway", incarnation: str = "i"
) -> Envelope:
    """From this sender; nobody looks at its type or its id."""
    sender = Sender(kind=kind, name=name, incarnation=incarnation)
    return Envelope(type="x", version=(1, 0), id="1", sender=sender, sent_at=0.0, body={})
