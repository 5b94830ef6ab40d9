"""Unreadable values in buckets: which error they are, and how their bytes are kept.

A value of another schema version is no garbage: a service that would lead with it refuses to (`NewerRecord`),
and nobody overwrites it. Every other unreadable value is kept in the stream `UNREADABLE` by a service that
writes the bucket, before that service writes another value there (docs/adr/0038-unreadable-records.md).
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from bus import subjects
from bus.logs import get_logger
from bus.messaging.port import BusPort
from bus.subject_row import Subject
from schemas.errors import BadMessage, DmscError, NewerRecord, UnreadableRecord
from schemas.unreadable import UnreadableValue

if TYPE_CHECKING:
    from bus.nats.jetstream import StreamMessage

log = get_logger("bus.messaging.unreadable_values")

PART_BYTES = 256 << 10
KEEPING_BYTES = 32 << 20
"""Most bytes of one connection's values that wait to be stored, however long that takes: the bus may stand
still or its disk be full. Values beyond that are not kept; the next read finds them again."""
PERISHABLE = frozenset({"kept"})
"""Buckets whose values have an end date: of those no copy is kept that would outlive it."""
KNOWN = 4_096
"""How many values one connection remembers, so as not to keep them twice."""


def judged(row: Subject, item: StreamMessage, error: BadMessage) -> NewerRecord | UnreadableRecord:
    """The error to raise about a value that could not be decoded."""
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
    """The record's name for people: `bucket.key`."""
    return f"{row.bucket}.{item.subject[len(row.prefix) + 1 :]}"


async def quarantine(bus: BusPort, row: Subject, item: StreamMessage, error: BadMessage) -> None:
    """Keeps the bytes of an unreadable value, once.

    Only a service that writes this row does so, because only such a service will overwrite the value. Never
    raises, and waits for at most `unreadable_wait_s`: a service that renews a lease must not be held up.
    """
    if bus.sender.kind not in row.senders or error.fields.get("reason") == "wrong version":
        return
    if row.bucket in PERISHABLE:
        log.error("unreadable record", record=name_of(row, item), revision=item.sequence, reason=error.text)
        return
    value_id = (item.subject, item.sequence)
    if value_id in bus.unreadable:
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
    bus.unreadable.add(value_id)
    bus.unreadable_bytes += len(item.data)
    task = bus.connection.spawn(_keep(bus, row, item, error), f"keep {name_of(row, item)}")
    await asyncio.wait({task}, timeout=bus.times.unreadable_wait_s)


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
            part_sequence = await bus.append(
                subjects.UNREADABLE,
                value,
                deadline_s=math.inf,
                sid=bus.sender.name,
                message_id=f"{item.subject}/{item.sequence}/{part}",
            )
            sequence = sequence or part_sequence
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
