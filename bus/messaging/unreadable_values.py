"""Values in buckets that nobody can read: judged, kept with their bytes, and what stands for them.

A value of another schema version is no garbage: whoever would lead with it refuses (`NewerRecord`), and
nobody overwrites it. Everything else that can't be read is kept on the stream `UNREADABLE` by a service that
writes the bucket, before it writes something else there (docs/adr/0038-unreadable-records.md).
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from bus import subjects
from bus.logs import get_logger
from bus.messaging.port import BusPort
from bus.subject import Subject
from schemas.errors import BadMessage, DmscError, NewerRecord, UnreadableRecord
from schemas.unreadable import UnreadableValue

if TYPE_CHECKING:
    from bus.nats.jetstream import StreamMessage

log = get_logger("bus.messaging.unreadable_values")

PART_BYTES = 256 << 10
KEEPING_BYTES = 32 << 20
"""Values of one connection that wait until the stream takes them, for however long: the bus may stand still
or its disk be full. What would be more is not kept, and found again by the next reading."""
WAIT_S = 0.3
"""How long whoever found a value waits for that."""
KNOWN = 4_096
"""Values that are not kept twice by one connection."""


def judged(row: Subject, item: StreamMessage, error: BadMessage) -> NewerRecord | UnreadableRecord:
    """What to raise about a value that could not be decoded."""
    record = name_of(row, item)
    if error.fields.get("reason") == "wrong version":
        return NewerRecord(
            f"the record {record} is of another version, and stays as it is ({error.text})",
            record=record,
            revision=item.sequence,
        )
    return UnreadableRecord(
        f"the record {record} can't be read ({error.text})", record=record, revision=item.sequence
    )


def name_of(row: Subject, item: StreamMessage) -> str:
    """`bucket.key`, as people call it."""
    return f"{row.bucket}.{item.subject[len(row.prefix) + 1 :]}"


async def quarantine(bus: BusPort, row: Subject, item: StreamMessage, error: BadMessage) -> None:
    """Keeps the value with its bytes, once; only by a service that writes this row, for it alone will write
    over it. Never raises, and waits but a moment: who renews a lease must not be held up."""
    if bus.sender.kind not in row.senders or error.fields.get("reason") == "wrong version":
        return
    known = (item.subject, item.sequence)
    if known in bus.unreadable:
        return
    if len(bus.unreadable) >= KNOWN:
        bus.unreadable.clear()
    if bus.unreadable_bytes + len(item.data) > KEEPING_BYTES:
        log.error(
            "unreadable record",
            record=name_of(row, item),
            revision=item.sequence,
            reason=error.text,
            size=len(item.data),
            bytes=f"not kept: {bus.unreadable_bytes} bytes of others wait already for the stream UNREADABLE",
        )
        return
    bus.unreadable.add(known)
    bus.unreadable_bytes += len(item.data)
    keeping = bus.link.spawn(_keep(bus, row, item, error), f"keep {name_of(row, item)}")
    await asyncio.wait({keeping}, timeout=WAIT_S)


async def _keep(bus: BusPort, row: Subject, item: StreamMessage, error: BadMessage) -> None:
    data, key, sequence = item.data, item.subject[len(row.prefix) + 1 :], 0
    pieces = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)] or [b""]
    now = time.time()
    assert row.bucket is not None
    try:
        for part, piece in enumerate(pieces):
            value = UnreadableValue(
                service=bus.sender.name,
                bucket=row.bucket,
                key=key,
                revision=item.sequence,
                reason=error.text[:500],
                at=now,
                size=len(data),
                part=part,
                parts=len(pieces),
                data=piece,
            )
            kept = await bus.append(
                subjects.UNREADABLE,
                value,
                deadline_s=math.inf,
                sid=bus.sender.name,
                message_id=f"{item.subject}/{item.sequence}/{part}",
            )
            sequence = sequence or kept
        where = f"stream UNREADABLE, sequence {sequence}"
    except DmscError as failure:
        bus.unreadable.discard((item.subject, item.sequence))
        where = f"not kept: {failure.text}"
    finally:
        bus.unreadable_bytes -= len(data)
    log.error(
        "unreadable record",
        record=f"{row.bucket}.{key}",
        revision=item.sequence,
        reason=error.text,
        size=len(data),
        bytes=where,
    )
