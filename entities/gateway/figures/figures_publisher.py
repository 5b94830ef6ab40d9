"""Says what this gateway answered: to the bus once a second while that changes, and to `/metrics`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

from bus import subjects
from bus.connection import Bus
from entities import metrics
from entities.gateway.figures.service_counter import ServiceCounter
from schemas.errors import DmscError
from schemas.services.figures import FIRST_TOKEN_S, ServiceFigures, VersionFigures
from schemas.services.model_service import WHOLE, ModelService, VersionState


@dataclass(frozen=True, kw_only=True)
class FiguresConfig:
    """How often figures are told, in seconds."""

    every_s: float = 1.0  # between two messages: how late a page, or a decision about replicas, is
    again_s: float = 5.0  # versions with answers under way, or changed lately, are told again after that
    lately_s: float = 60.0  # … if they changed within this time


class FiguresPublisher:
    """The figures of one gateway.

    Args:
        services: Those that are not stopped, as this gateway knows them.
        held: How many requests wait here for a version (service, version) that starts.
    """

    def __init__(
        self,
        bus: Bus,
        gateway: str,
        counter: ServiceCounter,
        services: Callable[[], Iterable[ModelService]],
        held: Callable[[str, str], int],
        config: FiguresConfig = FiguresConfig(),
    ) -> None:
        self._bus = bus
        self._gateway = gateway
        self._counter = counter
        self._services = services
        self._held = held
        self._config = config
        self._since = time.time()

    async def run(self) -> None:
        """Publishes until cancelled. What is lost is said with the next change."""
        again_at = 0.0
        while True:
            await asyncio.sleep(self._config.every_s)
            now = time.monotonic()
            again_from = None
            if now >= again_at:
                again_at, again_from = now + self._config.again_s, now - self._config.lately_s
            if versions := self._counter.changed(now, again_from):
                message = ServiceFigures(gateway=self._gateway, since=self._since, versions=versions)
                with suppress(DmscError):
                    await self._bus.publish(subjects.SERVICE_FIGURES, message, gateway=self._gateway)

    def readings(self) -> Iterator[metrics.MetricReading]:
        """The metrics of all versions that were asked, and of the traffic that each should get."""
        for figures in self._counter.figures(time.monotonic()):
            yield from self._counted(figures)
        for service in self._services():
            for version in service.versions:
                names = {"gateway": self._gateway, "service": service.service, "version": version.version}
                weight = service.weights.get(version.version, 0)
                yield metrics.SERVICE_HELD(self._held(service.service, version.version), **names)
                yield metrics.SERVICE_WEIGHT(weight / WHOLE, **names)
                yield metrics.SERVICE_READY(version.state is VersionState.READY, **names)
                for stage, replicas in enumerate(version.replicas):
                    yield metrics.SERVICE_REPLICAS(replicas, **names, stage=str(stage))

    def _counted(self, figures: VersionFigures) -> Iterator[metrics.MetricReading]:
        names = {"gateway": self._gateway, "service": figures.service, "version": figures.version}
        for outcome, times in figures.requests.items():
            yield metrics.SERVICE_REQUESTS(times, **names, outcome=outcome)
        yield metrics.SERVICE_TOKENS(figures.tokens, **names, kind="answer")
        yield metrics.SERVICE_TOKENS(figures.prompt_tokens, **names, kind="prompt")
        yield metrics.SERVICE_SESSIONS(figures.sessions, **names)
        yield metrics.SERVICE_WAITING(figures.waiting, **names)
        below = tuple(accumulate(figures.first_token))
        spread = metrics.Distribution(FIRST_TOKEN_S, below, figures.first_token_s)
        yield metrics.SERVICE_FIRST_TOKEN_S.spread(spread, **names)
