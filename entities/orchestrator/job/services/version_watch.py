"""The hard rule: a version that fails its first requests goes back at once, without any module (ADR-0152).

Gateways tell how requests ended. The rule itself is `entities.services.hard_rule`; what becomes of its reason
is arbitrated like a suggestion of the orchestrator's own loop, so that `automation` holds here, too.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
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

    `revision`, `weights`: of its record as gateways last had it. `rules`: of each candidate, by the revision
    since which it has traffic. `keys`: users who were counted: they were drawn once, however often they ask.
    """

    revision: int
    weights: dict[str, int]
    rules: dict[tuple[str, int], HardRule] = field(default_factory=dict)
    keys: set[int] = field(default_factory=set)


class FirstRequests:
    """The first requests to each candidate. Pure.

    What was drawn by other weights than the newest is not compared: gateways take them up a moment apart.
    """

    def __init__(self, config: HardRuleConfig = HardRuleConfig()) -> None:
        self._config = config
        self._watched: dict[str, _Watched] = {}

    def take(self, told: ServiceOutcomes, since: Mapping[str, int] | None = None) -> dict[str, str]:
        """Takes requests; returns the versions that have to go back, each with the reason.

        Args:
            told: By a gateway.
            since: The revision since which each version has traffic. One that went back and got traffic again
                is counted anew, and not by what comes late of before, even if nobody told of its absence.
        """
        since = since or {}
        if told.revision < max((since.get(each, 0) for each in told.candidates), default=0):
            return {}
        watched = self._watched.setdefault(told.service, _Watched(told.revision, told.weights))
        if told.revision < watched.revision and told.weights != watched.weights:
            return {}
        if told.weights != watched.weights:
            watched.keys.clear()
            for rule in watched.rules.values():
                rule.weights_changed()
        watched.revision, watched.weights = max(told.revision, watched.revision), told.weights
        drawn = [(each, since.get(each, 0)) for each in told.candidates if told.weights.get(each)]
        watched.rules = {each: watched.rules.get(each) or HardRule(self._config) for each in drawn}
        rules = {name: rule for (name, _), rule in watched.rules.items()}
        for request in told.requests if rules else ():
            if request.key is None or request.key not in watched.keys:
                self._count(rules, request, told.reference)
            if request.key is not None:
                watched.keys.add(request.key)
        if all(rule.is_over for rule in watched.rules.values()):
            watched.keys.clear()  # nobody is counted any more
        return {name: rule.reason for name, rule in rules.items() if rule.reason is not None}

    def _count(self, rules: Mapping[str, HardRule], request: AnsweredRequest, reference: str | None) -> None:
        if request.version == reference:
            for rule in rules.values():
                rule.add(candidate=False, ok=request.ok)
        elif (own := rules.get(request.version)) is not None:
            own.add(candidate=True, ok=request.ok)

    def forget(self, service: str) -> None:
        self._watched.pop(service, None)

    def is_over(self, service: str) -> bool:
        """Whether no candidate of this service has first requests to come."""
        watched = self._watched.get(service)
        return watched is not None and all(rule.is_over for rule in watched.rules.values())


class VersionWatch:
    """Hears how requests ended, and has bad versions go back.

    `services`: the records; `consider`: judges a suggestion of the orchestrator's own loop; `again_s`:
    seconds until what was declined is said again, for automation may be on by then; `skew_s`: seconds that
    clocks may differ by.
    """

    def __init__(
        self,
        bus: Bus,
        services: Mapping[str, ModelService],
        consider: Callable[[PolicySuggestion], Awaitable[object]],
        again_s: float = 10.0,
        skew_s: float = 60.0,
    ) -> None:
        self._again_s = again_s
        self._skew_s = skew_s
        self._bus = bus
        self._services = services
        self._consider = consider
        self._first = FirstRequests()
        self._said: dict[tuple[str, str], tuple[dict[str, int], float]] = {}

    async def resume(self) -> None:
        """Counts what gateways have told since the last change of each service's traffic, until the first
        requests are over. Where clocks were put back by more than a minute since then, it begins with 0.
        """
        shared = [each for each in self._services.values() if len(each.weights) > 1 and each.history]
        if shared:
            await insistently(partial(self._recount, {each.service: each for each in shared}))

    async def _recount(self, shared: Mapping[str, ModelService]) -> None:
        self._first = FirstRequests()
        since = min(service.history[-1].at for service in shared.values()) - self._skew_s
        async with aclosing(self._bus.history(subjects.SERVICE_OUTCOMES, since=since)) as told_before:
            async for record in told_before:
                told = record.message
                if not isinstance(told, ServiceOutcomes):
                    continue
                service = shared.get(told.service)
                if service is None or told.revision < service.shared_since:
                    continue
                self._first.take(told, _granted(service))
                if all(map(self._first.is_over, shared)):
                    return

    async def take(self, told: ServiceOutcomes, envelope: Envelope) -> None:
        service = self._services.get(told.service)
        if service is None:
            self._first.forget(told.service)
            for where in [each for each in self._said if each[0] == told.service]:
                del self._said[where]
            return
        for version, reason in self._first.take(told, _granted(service)).items():
            serves, where, now = service.version(version), (told.service, version), time.monotonic()
            if serves is None or not service.weights.get(version):
                continue  # it has gone back
            weights, at = self._said.get(where, ({}, 0.0))
            if weights == told.weights and now < at + self._again_s:
                continue
            self._said[where] = told.weights, now
            await self._consider(_suggestion(told.service, version, serves.job, reason))


def _granted(service: ModelService) -> dict[str, int]:
    return {version: service.granted_since(version) for version in service.weights}


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
