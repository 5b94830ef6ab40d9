"""The historical tap: messages that the streams still hold, as a live tap would have seen them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from bus.connection import Bus
from bus.messaging import stream_specs
from bus.nats.ordered_consumer import OrderedConsumer
from bus.tap.decoder import TapDecoder
from bus.tap.message import RawMessage, TappedMessage
from schemas.errors import NotFound


async def past(bus: Bus, decoder: TapDecoder) -> AsyncGenerator[TappedMessage, None]:
    """Yields all stream messages that `decoder` lets through, stream by stream, with the server's times.

    Requests, answers and key-value changes are in no stream.

    Raises:
        Unavailable: the connection to the bus broke meanwhile.
    """
    for spec in stream_specs.STREAMS:
        for pattern in filter(decoder.allows, spec.subjects):
            try:
                async with (
                    OrderedConsumer.open(bus.connection, spec.name, pattern, start=1) as reader,
                    aclosing(reader.present()) as items,
                ):
                    async for item in items:
                        if not decoder.covers(item.subject):
                            continue
                        for tapped in decoder.look(RawMessage(item.at, item.subject, item.data)):
                            yield tapped
            except NotFound:
                continue  # the stream was not provisioned
