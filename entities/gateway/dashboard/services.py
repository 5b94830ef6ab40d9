"""What the dashboard's routes share: the aggregator, log search, taps, and the check of access."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from typing import Any

from bus.connection import Bus
from entities.gateway.dashboard.aggregator import AggregatorConfig, DashboardAggregator
from entities.gateway.dashboard.logs import LogSearch
from entities.gateway.dashboard.tap_stream import TapSessions
from entities.gateway.dashboard.view_model import PAGE, OverviewPart
from entities.gateway.operations.access_client import Bearer
from entities.gateway.server_sent_events import KEEPALIVE, encode_event
from schemas.registry import ServiceRecord
from schemas.services.model_service import ModelService
from schemas.signals import AccessDecision

_NEEDS = (
    ("job.list", "jobs", frozenset({"jobs", "queue", "curves", "events", "progress"})),
    ("fault.read", "faults", frozenset({"events", "faults"})),
    ("service.read", "services", frozenset({"services"})),
)
"""What parts of the view need besides `mesh.read`."""


class Dashboard:
    """The parts behind the dashboard's routes.

    `close` ends the open streams; call it before the HTTP API stops.
    """

    def __init__(
        self,
        bus: Bus,
        gateway: str,
        records: Callable[[], Collection[ServiceRecord]],
        config: AggregatorConfig | None = None,
        services: Callable[[], Iterable[ModelService]] = tuple,
    ) -> None:
        self.gateway = gateway
        self.aggregator = DashboardAggregator(
            bus, lambda: {record.sid: record for record in records()}, config, services=services
        )
        self.logs = LogSearch(bus)
        self.taps = TapSessions(bus)

    async def close(self) -> None:
        await self.aggregator.close()

    async def check_access(self, bearer: Bearer, parts: Collection[OverviewPart] = PAGE) -> AccessDecision:
        """The bearer's access. Raises `Refused` unless the bearer may see all that these parts contain."""
        for action, resource, guarded in _NEEDS:
            if not guarded.isdisjoint(parts):
                await bearer.check(action, resource)
        return await bearer.check("mesh.read", "mesh")

    def you(self, access: AccessDecision) -> dict[str, Any]:
        return {"user": access.user, "role": access.role, "gateway": self.gateway}

    async def live(self, access: AccessDecision) -> AsyncGenerator[bytes, None]:
        """Frames for one browser: the whole view, then deltas, until it disconnects."""
        async with self.aggregator.viewer() as viewer:
            yield encode_event("you", self.you(access))
            quiet_since = time.monotonic()
            while not self.aggregator.closed:
                frame = await viewer.next(self.aggregator.config.check_s)
                now = time.monotonic()
                if frame is not None:
                    quiet_since = now
                    yield frame
                elif now - quiet_since >= self.aggregator.config.keepalive_s:
                    quiet_since = now
                    yield KEEPALIVE
