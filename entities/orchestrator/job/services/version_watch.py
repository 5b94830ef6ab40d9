"""The hard rule: a version that fails its first requests goes back at once, without any module (ADR-0152).

Gateways tell how requests ended. The rule itself is `entities.services.hard_rule`; what becomes of its reason
is arbitrated like a suggestion of the orchestrator's own loop, so that `automation` holds here, too.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.orchestrator.job.term import insistently
from entities.services.hard_rule import HardRule, HardRuleConfig
from schemas.actions import RollBack, scope_of
from schemas.automation import OWN_LOOP
from schemas.envelope import Envelope
from schemas.policy import PolicySuggestion
from schemas.services.model_service import ModelService
from schemas.services.outcomes import AnsweredRequest, ServiceOutcomes

log = get_logger("orchestrator")


@dataclass(slots=True)
class _Watched:
    """What is counted of one service.

    `revision`, `weights`: of its record as gateways last had it. `keys`: users who were counted: they were
    drawn once, however often they ask.
    """

    revision: int
    weights: dict[str, int]
    rules: dict[str, HardRule] = field(default_factory=dict)
    keys: set[int] = field(default_factory=set)


class FirstRequests:
    """The first requests to each candidate. Pure.

    What was drawn by other weights than the newest is not compared: gateways take them up a moment apart.
    """

    def __init__(self, config: HardRuleConfig = HardRuleConfig()) -> None:
        self._config = config
        self._watched: dict[str, _Watched] = {}

    def take(self, told: ServiceOutcomes) -> dict[str, str]:
        """Takes requests; returns the versions that have to go back, each with the reason."""
        watched = self._watched.setdefault(told.service, _Watched(told.revision, told.weights))
        if told.revision < watched.revision and told.weights != watched.weights:
            return {}
        if told.weights != watched.weights:
            watched.keys.clear()
            for rule in watched.rules.values():
                rule.weights_changed()
        watched.revision, watched.weights = max(told.revision, watched.revision), told.weights
        drawn = [each for each in told.candidates if told.weights.get(each)]
        watched.rules = {name: watched.rules.get(name) or HardRule(self._config) for name in drawn}
        for request in told.requests if drawn else ():
            if request.key is None or request.key not in watched.keys:
                self._count(watched.rules, request, told.stable)
            if request.key is not None:
                watched.keys.add(request.key)
        return {name: rule.reason for name, rule in watched.rules.items() if rule.reason is not None}

    def _count(self, rules: Mapping[str, HardRule], request: AnsweredRequest, stable: str | None) -> None:
        if request.version == stable:
            for rule in rules.values():
                rule.add(candidate=False, ok=request.ok)
        elif (own := rules.get(request.version)) is not None:
            own.add(candidate=True, ok=request.ok)

    def forget(self, service: str) -> None:
        self._watched.pop(service, None)


class VersionWatch:
    """Hears how requests ended, and has bad versions go back.

    `services`: the records; `consider`: judges a suggestion of the orchestrator's own loop; `again_s`:
    seconds until what was declined is said again, for automation may be on by then.
    """

    def __init__(
        self,
        bus: Bus,
        services: Mapping[str, ModelService],
        consider: Callable[[PolicySuggestion], Awaitable[object]],
        again_s: float = 10.0,
    ) -> None:
        self._again_s = again_s
        self._bus = bus
        self._services = services
        self._consider = consider
        self._first = FirstRequests()
        self._said: dict[tuple[str, str], tuple[dict[str, int], float]] = {}

    async def resume(self) -> None:
        """Counts what gateways have told since the last change of each service's traffic."""
        since = {
            service.service: service.history[-1].at
            for service in self._services.values()
            if len(service.weights) > 1 and service.history
        }
        if since:
            await insistently(partial(self._recount, since))

    async def _recount(self, since: Mapping[str, float]) -> None:
        self._first = FirstRequests()
        async for record in self._bus.history(subjects.SERVICE_OUTCOMES, since=min(since.values())):
            told = record.message
            if isinstance(told, ServiceOutcomes) and record.envelope.sent_at >= since.get(told.service, 2e10):
                self._first.take(told)

    async def take(self, told: ServiceOutcomes, envelope: Envelope) -> None:
        service = self._services.get(told.service)
        if service is None:
            self._first.forget(told.service)
            return
        for version, reason in self._first.take(told).items():
            serves, where, now = service.version(version), (told.service, version), time.monotonic()
            if serves is None or not service.weights.get(version):
                continue  # it has gone back
            weights, at = self._said.get(where, ({}, 0.0))
            if weights == told.weights and now < at + self._again_s:
                continue
            self._said[where] = told.weights, now
            await self._consider(_suggestion(told.service, version, serves.job, reason))


def _suggestion(service: str, version: str, job: str, reason: str) -> PolicySuggestion:
    action = RollBack(service=service, version=version)
    return PolicySuggestion(
        module=OWN_LOOP,
        version="1",
        job=job,
        action=action,
        confidence=0.99,
        reason=f"{version}: {reason}",
        input_revision=0,
        valid_s=60.0,
        scope=scope_of(action),
    )
