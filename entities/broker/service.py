"""The broker's service, and the same beside another one, in a process that is there anyway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from bus.broker.relay import BrokerRelay
from bus.connection import Bus
from bus.logs import get_logger
from bus.mesh.registration import RegistrationClient
from entities.metrics import BROKER_CALLS, BROKER_DROPPED, BROKER_REFUSED, BROKER_WAITING, MetricReading
from schemas.envelope import EntityKind
from schemas.errors import DmscError
from schemas.registry import Endpoint, InstanceState, ServiceRecord

log = get_logger("broker")

AGAIN_S = 0.5
NODE = "mesh"


class Broker:
    """One of any number that share the questions."""

    def __init__(self, bus: Bus) -> None:
        self.relay = BrokerRelay(bus)
        self._bus = bus

    def readings(self) -> Iterator[MetricReading]:
        """For whoever scrapes this process."""
        for kind, count in self.relay.asked.items():
            yield BROKER_CALLS(count, kind=kind)
        for kind, count in self.relay.refused.items():
            yield BROKER_REFUSED(count, kind=kind)
        yield BROKER_DROPPED(self.relay.turns.dropped.total())
        yield BROKER_WAITING(self.relay.turns.waiting)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until cancelled; what is in hand is answered first."""
        await self._bus.listen(self.relay)
        present = asyncio.create_task(self._present(), name=f"presence of {self._bus.sender.name}")
        try:
            log.debug("broker ready", service=self._bus.sender.name)
            if ready is not None:
                ready.set()
            await asyncio.Event().wait()
        finally:
            present.cancel()
            await asyncio.gather(present, return_exceptions=True)
            await self.relay.stop()

    async def _present(self) -> None:
        """Serving does not wait for the registry, which may itself need a moment."""
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
    """A broker for the time of the block; one that can't be reached is tried again and again."""

    async def serve() -> None:
        said = ""
        while True:
            try:
                async with Bus.connect(servers, name=name, kind=EntityKind.BROKER, token=token) as bus:
                    said = ""
                    await Broker(bus).run()
            except DmscError as error:
                if error.code != said:
                    said = error.code
                    log.warning("broker is not on the bus", service=name, reason=error.text)
            await asyncio.sleep(AGAIN_S)

    serving = asyncio.create_task(serve(), name=name)
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
