"""The broker's service, and a context manager that runs it beside another service in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from bus.broker.relay import BrokerRelay
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from bus.tasks import background, cancel
from entities.metrics import BROKER_CALLS, BROKER_DROPPED, BROKER_REFUSED, BROKER_WAITING, MetricReading
from schemas.envelope import EntityKind
from schemas.errors import DmscError
from schemas.registry import Endpoint, InstanceState, ServiceRecord

log = get_logger("broker")

AGAIN_S = 0.5
NODE = "mesh"


class Broker:
    """One broker; any number of them share the calls."""

    def __init__(self, bus: Bus) -> None:
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
        """Serve until cancelled; calls under way are answered first."""
        await self._bus.listen(self.relay)
        name = f"presence of {self._bus.sender.name}"
        registration = asyncio.create_task(self._keep_registered(), name=name)
        try:
            log.debug("broker ready", service=self._bus.sender.name)
            if ready is not None:
                ready.set()
            await asyncio.Event().wait()
        finally:
            await cancel(registration)
            await self.relay.stop()

    async def _keep_registered(self) -> None:
        """Register in the registry and retry; serving does not wait for it, as it may start later."""
        while True:
            try:
                async with RegistrationClient(self._bus, self._record()):
                    await asyncio.Event().wait()
            except DmscError as error:
                log.info("broker is not registered yet", reason=error.text)
                await asyncio.sleep(AGAIN_S)

    def _record(self) -> ServiceRecord:
        return ServiceRecord(
            sid=self._bus.sender.name,
            prefix="entity/broker",
            kind=EntityKind.BROKER,
            incarnation=self._bus.sender.incarnation,
            state=InstanceState.ACTIVE,
            endpoint=Endpoint(cluster="mesh", node=NODE),
        )


@asynccontextmanager
async def brokering(servers: Sequence[str], token: str | None, name: str) -> AsyncIterator[None]:
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
            await asyncio.sleep(AGAIN_S)

    async with background(serve(), name=name):
        yield
