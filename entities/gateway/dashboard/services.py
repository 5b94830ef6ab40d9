"""What the dashboard's routes share: the feed of all viewers, log search, taps, who may look."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

from bus.connection import Bus
from entities.gateway.dashboard.aggregator import AggregatorConfig, DashboardAggregator
from entities.gateway.dashboard.logs import LogSearch
from entities.gateway.dashboard.tap_stream import TapSessions
from entities.gateway.dashboard.viewers import sse
from entities.gateway.operations.access import TapOperations
from entities.gateway.operations.access_client import AccessClient
from schemas.registry import ServiceRecord
from schemas.signals import AccessDecision

KEEPALIVE_S = 15.0
LOOKED_S = 1.0
"""How often a stream looks whether the feed was closed."""


class Dashboard:
    """What the routes share. `close` before the door closes: open streams then end by themselves."""

    def __init__(
        self,
        bus: Bus,
        guard: AccessClient,
        gateway: str,
        records: Callable[[], Collection[ServiceRecord]],
        config: AggregatorConfig | None = None,
    ) -> None:
        self.guard = guard
        self.gateway = gateway
        self.feed = DashboardAggregator(bus, lambda: {record.sid: record for record in records()}, config)
        self.logs = LogSearch(bus)
        self.taps = TapSessions(bus)
        self.scopes = TapOperations(guard)

    async def close(self) -> None:
        await self.feed.close()

    async def may_look(self, token: str) -> AccessDecision:
        """Raises `Refused` where the bearer may not see all that the view has."""
        for action, resource in (("job.list", "jobs"), ("fault.read", "faults")):
            await self.guard.check(token, action, resource)
        return await self.guard.check(token, "mesh.read", "mesh")

    def you(self, access: AccessDecision) -> dict[str, Any]:
        return {"user": access.user, "role": access.role, "gateway": self.gateway}

    async def live(self, access: AccessDecision) -> AsyncGenerator[bytes, None]:
        """The whole picture, then what changes, until the client goes."""
        async with self.feed.viewer() as viewer:
            yield sse("you", self.you(access))
            quiet_since = time.monotonic()
            while not self.feed.closed:
                frame = await viewer.next(LOOKED_S)
                now = time.monotonic()
                if frame is not None:
                    quiet_since = now
                    yield frame
                elif now - quiet_since >= KEEPALIVE_S:
                    quiet_since = now
                    yield b": waiting\n\n"
