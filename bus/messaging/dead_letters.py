"""Dead letters: unusable messages are counted, logged once per kind, and kept in the stream DEAD_LETTERS."""

from __future__ import annotations

from bus import subjects
from bus.logs import get_logger
from bus.messaging.port import BusPort
from bus.subject_row import Subject
from bus.wire.redaction import redacted
from schemas.errors import BadMessage, DmscError
from schemas.telemetry import DeadLetter

log = get_logger("bus.messaging.dead_letters")

READ_BYTES = 1 << 20
"""Nothing is kept of a larger message, because it would have to be read again to redact its secrets."""
HEAD_BYTES = 1_024
"""Bytes that are kept of an unusable message."""


async def dead_letter(bus: BusPort, row: Subject, subject: str, data: bytes, error: BadMessage) -> None:
    """Counts the message, logs once per row and reason, and publishes a `DeadLetter`. Never raises."""
    reason = str(error.fields.get("reason", "bad message"))
    bus.counters.dead_letters += 1
    if (row.name, reason) not in bus.counters.reported:
        bus.counters.reported.add((row.name, reason))
        log.warning(
            "unusable message",
            row=row.name,
            subject=subject,
            reason=reason,
            detail=error.text,
            size=len(data),
            service=bus.sender.name,
        )
    if row is subjects.DEAD_LETTER:
        return  # an unusable dead letter must not breed another
    letter = DeadLetter(
        service=bus.sender.name,
        subject=subject,
        reason=f"{reason}: {error.text}"[:500],
        size=len(data),
        head=redacted(data, row)[:HEAD_BYTES] if len(data) <= READ_BYTES else b"",
    )
    try:
        await bus.publish(subjects.DEAD_LETTER, letter, sid=bus.sender.name)
    except DmscError as failure:
        log.debug("dead letter not published", error=failure.text)
