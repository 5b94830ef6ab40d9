"""Gathers outcomes of requests, and publishes them twice a second (ADR-0150)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.gateway.outcomes.request_outcome import AnswerTrace, RequestDraw, outcome_of, prediction_outcome
from schemas.errors import DmscError
from schemas.services.model_service import ModelService
from schemas.services.outcomes import MOST_OUTCOMES, AnsweredRequest, MirroredRequest, ServiceOutcomes

log = get_logger("generation")


@dataclass(frozen=True, kw_only=True)
class OutcomeConfig:
    """`every_s`: seconds between two reports; `last_s`: for those of a gateway that stops; `most_waiting`:
    reports that wait until the next one.
    """

    every_s: float = 0.5
    last_s: float = 1.0
    most_waiting: int = 64


@dataclass(slots=True)
class _Gathered:
    """Outcomes of requests that were drawn by one state of a service's traffic."""

    service: ModelService
    requests: list[AnsweredRequest] = field(default_factory=list)
    mirrored: list[MirroredRequest] = field(default_factory=list)

    def __len__(self) -> int:
        return max(len(self.requests), len(self.mirrored))


class OutcomeReports:
    """The outcomes of one gateway. `services`: those that it knows now."""

    def __init__(
        self,
        bus: Bus,
        gateway: str,
        services: Callable[[], Iterable[ModelService]],
        config: OutcomeConfig = OutcomeConfig(),
    ) -> None:
        self._bus = bus
        self._gateway = gateway
        self._services = services
        self._config = config
        self._gathered: dict[str, _Gathered] = {}
        self._due: deque[ServiceOutcomes] = deque(maxlen=config.most_waiting)
        self._told: dict[str, ServiceOutcomes] = {}

    def ended(self, draw: RequestDraw, trace: AnswerTrace) -> None:
        """An answer is over."""
        self._add(draw, outcome_of(draw, trace))

    def predicted(self, draw: RequestDraw, at: float, error: DmscError | None = None) -> None:
        """A prediction was answered at `at` of the loop's clock, or failed."""
        self._add(draw, prediction_outcome(draw, at, error))

    def _add(self, draw: RequestDraw, outcome: AnsweredRequest | None) -> None:
        if outcome is not None and draw.is_drawn and is_judged(draw.service):
            self._of(draw.service).requests.append(outcome)

    def mirrored(self, service: ModelService, pair: MirroredRequest) -> None:
        """A version in shadow has answered what another one answered."""
        self._of(service).mirrored.append(pair)

    def _of(self, service: ModelService) -> _Gathered:
        gathered = self._gathered.get(service.service)
        if gathered is not None and (len(gathered) >= MOST_OUTCOMES or not _same(gathered.service, service)):
            self._due.append(self._report(gathered))
            gathered = None
        if gathered is None:
            gathered = self._gathered[service.service] = _Gathered(service)
        return gathered

    def _report(self, gathered: _Gathered) -> ServiceOutcomes:
        service = gathered.service
        compared = {each.version: each.worse_nll for each in service.versions}
        return ServiceOutcomes(
            gateway=self._gateway,
            service=service.service,
            revision=service.revision,
            weights=service.weights,
            shadow=service.shadow,
            stable=service.stable,
            jobs={each.version: each.job for each in service.versions},
            worse_nll={version: most for version, most in compared.items() if most is not None},
            requests=tuple(gathered.requests),
            mirrored=tuple(gathered.mirrored),
        )

    async def run(self) -> None:
        """Reports until cancelled, and once more then. What the bus does not take is lost, of all versions
        alike: nobody judges by one request.
        """
        try:
            while True:
                await asyncio.sleep(self._config.every_s)
                await self._publish_gathered()
                for changed in self._changed():
                    await self._publish(changed)
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.last_s):
                    await self._publish_gathered()

    async def _publish_gathered(self) -> None:
        gathered, self._gathered = self._gathered, {}
        self._due.extend(self._report(each) for each in gathered.values())
        while self._due:
            await self._publish(self._due.popleft())

    def _changed(self) -> list[ServiceOutcomes]:
        """Reports without requests, of services whose traffic is another one than was told last."""
        found, services = [], list(self._services())
        for gone in self._told.keys() - {service.service for service in services}:
            del self._told[gone]
        for service in services:
            told = self._told.get(service.service)
            if told is None and not is_judged(service):
                continue
            if told is None or not (_same(told, service) or told.revision > service.revision):
                found.append(self._report(_Gathered(service)))
        return found

    async def _publish(self, report: ServiceOutcomes) -> None:
        told = self._told.get(report.service)
        try:
            await self._bus.publish(subjects.SERVICE_OUTCOMES, report, gateway=self._gateway)
        except DmscError as error:
            log.info("outcomes not told", service=report.service, code=error.code)
            return
        if told is None or report.revision >= told.revision:
            self._told[report.service] = report.model_copy(update={"requests": (), "mirrored": ()})


def is_judged(service: ModelService) -> bool:
    """Whether there are versions to compare: two with traffic, or one in shadow."""
    return is_shared(service) or bool(service.shadow)


def is_shared(service: ModelService) -> bool:
    """Whether two versions or more have traffic."""
    return sum(weight > 0 for weight in service.weights.values()) > 1


def _same(told: ModelService | ServiceOutcomes, service: ModelService) -> bool:
    """Whether requests were drawn in the same way."""
    before = (told.weights, told.shadow, told.stable)
    return before == (service.weights, service.shadow, service.stable)
