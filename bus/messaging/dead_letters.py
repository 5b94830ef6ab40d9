"""What a service cannot use is counted, logged once per kind, and kept on the stream of dead letters."""

from __future__ import annotations

from bus import subjects
from bus.logs import get_logger
from bus.messaging.port import BusPort
from bus.subject import Subject
from bus.wire.redaction import redacted
from schemas.errors import BadMessage, DmscError
from schemas.telemetry import DeadLetter

log = get_logger("bus.messaging.dead_letters")

READ_BYTES = 1 << 20
"""Of a larger one nothing is kept: it would have to be read once more, for its secrets to be taken out."""
HEAD_BYTES = 1_024
"""How much of an unusable message is kept."""


async def dead_letter(bus: BusPort, row: Subject, subject: str, data: bytes, error: BadMessage) -> None:
    """Counts it, says so once per (row, reason), and publishes a `DeadLetter`. Never raises."""
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
