"""The last minutes of a row's stream, found without reading the hours before them.

A module rebuilds its state from these at each start. The streams keep up to a day, so the start is found by
binary search: some twenty messages are read instead of some hundred thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from bus.connection import Bus
from bus.messaging.streams import StreamRecord
from bus.subject_row import Subject

NEAR = 512
"""A range of at most this many messages is read instead of searched."""

Look = Callable[[int], Any]


async def recent(bus: Bus, row: Subject, since: float, **tokens: Any) -> list[StreamRecord]:
    """Messages sent on `row` since `since` (seconds since the epoch, by the senders' clocks), in order.

    Raises:
        NotFound: The mesh's streams do not exist yet.
        Unavailable: The bus went away meanwhile.
    """

    async def first_from(sequence: int) -> StreamRecord | None:
        async with aclosing(bus.history(row, start=sequence, **tokens)) as items:
            async for item in items:
                return item
        return None

    start = await _search(first_from, since)
    if start is None:
        return []
    records: list[StreamRecord] = []
    async with aclosing(bus.history(row, start=start, **tokens)) as items:
        async for item in items:
            if item.envelope.sent_at >= since:
                records.append(item)
    return records


async def _search(first_from: Look, since: float) -> int | None:
    """A sequence before which no message was sent since `since`; None if the stream is empty."""
    oldest: StreamRecord | None = await first_from(1)
    if oldest is None:
        return None
    early, step = oldest.sequence, NEAR  # no message before `early` is needed
    if oldest.envelope.sent_at >= since:
        return early
    late = early + step
    while (item := await first_from(late)) is not None and item.envelope.sent_at < since:
        early, step = item.sequence, 2 * step
        late = early + step
    while late - early > NEAR:
        middle = (early + late) // 2
        item = await first_from(middle)
        if item is not None and item.envelope.sent_at < since:
            early = item.sequence
        else:
            late = middle
    return int(early)
