"""The broker's service, and the same beside another one, in a process that is there anyway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bus.broker.relay import Relay
from bus.connection import Bus
from bus.logs import get_logger
from schemas.envelope import EntityKind
from schemas.errors import DmscError

log = get_logger("broker")

AGAIN_S = 0.5


class Broker:
    """One of any number that share the questions."""

    def __init__(self, bus: Bus) -> None:
        self.relay = Relay(bus)
        self._bus = bus

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Serve until cancelled; what is in hand is answered first."""
        await self._bus.listen(self.relay)
        try:
            log.debug("broker ready", service=self._bus.sender.name)
            if ready is not None:
                ready.set()
            await asyncio.Event().wait()
        finally:
            await self.relay.stop()


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
