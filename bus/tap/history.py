"""What the streams still hold, as a tap would have seen it: for what went by before anyone looked."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from bus.connection import Bus
from bus.messaging import stream_specs
from bus.nats.ordered_consumer import OrderedConsumer
from bus.tap.decoder import TapDecoder
from bus.tap.message import RawMessage, TappedMessage
from schemas.errors import NotFound


async def past(bus: Bus, lens: TapDecoder) -> AsyncGenerator[TappedMessage, None]:
    """Every message of the streams that the lens lets through, stream by stream, at the server's times.

    Requests, answers and key-value changes are in none of them.

    Raises:
        Unavailable: the bus went away meanwhile.
    """
    for spec in stream_specs.STREAMS:
        for pattern in filter(lens.allows, spec.subjects):
            try:
                async with (
                    OrderedConsumer.open(bus.link, spec.name, pattern, start=1) as reader,
                    aclosing(reader.present()) as items,
                ):
                    async for item in items:
                        if not lens.covers(item.subject):
                            continue
                        tapped = lens.look(RawMessage(item.at, item.subject, item.data))
                        if tapped is not None:
                            yield tapped
            except NotFound:
                continue  # nobody has provisioned it
