"""What recording streams hold: each stores in its own time, also after the server has answered a PING."""

from __future__ import annotations

from bus.connection import Bus
from bus.nats import jetstream
from bus.subject_row import Subject
from tests.waiting import eventually


async def subject_counts(bus: Bus, stream: str) -> dict[str, int]:
    """How many messages of each subject a stream has."""
    info = await jetstream.call(bus.connection, f"STREAM.INFO.{stream}", {"subjects_filter": ">"})
    return info["state"].get("subjects") or {}


async def until_recorded(bus: Bus, row: Subject, count: int, **tokens: str) -> None:
    """Waits until the stream of `row` has as many of its messages as this."""
    assert row.stream is not None
    stream, prefix = row.stream, row(**tokens) if tokens else row.wildcard().partition("*")[0]
    found: dict[str, int] = {}

    async def complete() -> bool:
        nonlocal found
        counts = await subject_counts(bus, stream)
        found = {subject: number for subject, number in counts.items() if subject.startswith(prefix)}
        return sum(found.values()) >= count

    await eventually(complete, lambda: f"{count} of {prefix}: {found}")
