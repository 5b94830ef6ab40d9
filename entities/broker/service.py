"""The broker's service, and a context manager that runs it beside another service in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from bus.broker.relay import BrokerRelay
from bus.connection import Bus
from bus.logs import get_logger
from bus.tasks import background
from entities.metrics import BROKER_CALLS, BROKER_DROPPED, BROKER_REFUSED, BROKER_WAITING, MetricReading
from entities.presence.entity_record import entity_record, stay_registered
from schemas.envelope import EntityKind
from schemas.errors import DmscError

log = get_logger("broker")

NODE = "mesh"


class Broker:
    """One broker; any number of them share the calls."""

    def __init__(self, bus: Bus, *, retry_s: float = 0.5) -> None:
        """`retry_s` is the pause before a registration that failed is tried again."""
        self._retry_s = retry_s
        self.relay = BrokerRelay(bus)
        self._bus = bus

    def readings(self) -> Iterator[MetricReading]:
        """The metrics of this broker."""
        for kind, count in self.relay.asked.items():
            yield BROKER_CALLS(count, kind=kind)
        for kind, count in self.relay.refused.items():
            yield BROKER_REFUSED(count, kind=kind)
        yield BROKER_DROPPED(self.relay.turns.dropped.total())
        yield BROKER_WAITING(self.relay.turns.waiting)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until cancelled; calls under way are answered first.

        Serving does not wait for the registration, because the registry may start later.
        """
        await self._bus.listen(self.relay)
        sender = self._bus.sender
        record = entity_record(EntityKind.BROKER, sender.name, sender.incarnation, node=NODE)
        registration = stay_registered(self._bus, record, log.info, retry_s=self._retry_s)
        try:
            async with background(registration, name=f"presence of {sender.name}"):
                log.debug("broker ready", service=sender.name)
                if ready is not None:
                    ready.set()
                await asyncio.Event().wait()
        finally:
            await self.relay.stop()


@asynccontextmanager
async def brokering(
    servers: Sequence[str], token: str | None, name: str, *, retry_s: float = 0.5
) -> AsyncIterator[None]:
    """Run a broker for the time of the block; it reconnects until the bus can be reached."""

    async def serve() -> None:
        last_code = ""
        while True:
            try:
                async with Bus.connect(servers, name=name, kind=EntityKind.BROKER, token=token) as bus:
                    last_code = ""
                    await Broker(bus).run()
            except DmscError as error:
                if error.code != last_code:
                    last_code = error.code
                    log.warning("broker is not on the bus", service=name, reason=error.text)
            await asyncio.sleep(retry_s)

    async with background(serve(), name=name):
        yield
