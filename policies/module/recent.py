"""The last minutes of a row's stream, found without reading the hours before them.

A module that starts (again) rebuilds its state from these. The streams keep up to a day, so the place to
start from is searched for by halving: some twenty messages are looked at instead of some hundred thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from bus.connection import Bus
from bus.messaging.streams import StreamRecord
from bus.subject import Subject

NEAR = 512
"""Messages of the stream that are rather read than searched."""

Look = Callable[[int], Any]


async def recent(bus: Bus, row: Subject, since: float, **tokens: Any) -> list[StreamRecord]:
    """What was sent on `row` since `since` (seconds since the epoch, by its senders' clocks), in order.

    Raises:
        NotFound: the mesh's streams have not been made yet.
        Unavailable: the bus went away meanwhile.
    """

    async def first_from(sequence: int) -> StreamRecord | None:
        async with aclosing(bus.history(row, start=sequence, **tokens)) as items:
            async for item in items:
                return item
        return None

    start = await _search(first_from, since)
    if start is None:
        return []
    found: list[StreamRecord] = []
    async with aclosing(bus.history(row, start=start, **tokens)) as items:
        async for item in items:
            if item.envelope.sent_at >= since:
                found.append(item)
    return found


async def _search(first_from: Look, since: float) -> int | None:
    """A sequence from which on nothing sent since `since` is missed; None if the stream is empty."""
    oldest: StreamRecord | None = await first_from(1)
    if oldest is None:
        return None
    early, step = oldest.sequence, NEAR  # nothing before `early` is wanted
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
