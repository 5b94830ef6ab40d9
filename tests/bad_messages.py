"""Messages that nobody can use: what a faulty or hostile sender puts on a subject."""

from __future__ import annotations

import msgpack

from bus.subject_row import Subject


def envelope(row: Subject, **changes: object) -> bytes:
    """A well-formed envelope around an empty body, with changes."""
    fields = {
        "type": row.schema.wire_type,
        "version": [1, 0],
        "id": "intruder-1",
        "sender": {"name": "intruder", "kind": "client", "incarnation": "i"},
        "sent_at": 1.0,
        "body": {},
    }
    packed: bytes = msgpack.packb(fields | changes)
    return packed


def bad_messages(row: Subject) -> dict[str, bytes]:
    good = envelope(row)
    return {
        "empty": b"",
        "noise": bytes(range(256)),
        "text": b"hello",
        "truncated": good[: len(good) // 2],
        "no envelope": msgpack.packb([1, 2, 3]),
        "wrong major": envelope(row, version=[99, 0]),
        "unknown type": envelope(row, type="no.such.type"),
        "another row's type": envelope(row, type="telemetry.log"),
        "body of the wrong type": envelope(row, body={"sid": ["?"], "record": 3, "job": {}, "tags": 5}),
        "large": b"\xdb" + b"x" * 900_000,
    }
