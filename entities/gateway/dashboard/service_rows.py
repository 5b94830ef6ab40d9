"""Services in the form that a browser gets: versions, traffic, and what gateways answered lately. Pure.

Gateways tell counts since they began. What was answered in the last `window_s` seconds is the difference of
two messages of one gateway, summed over gateways.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from entities.gateway.dashboard.rows import LastReport, Row, rounded, significant
from schemas.envelope import EntityKind
from schemas.registry import ServiceRecord
from schemas.services.figures import FIRST_TOKEN_S, ServiceFigures, VersionFigures
from schemas.services.model_service import WHOLE, ModelService, ServedVersion, TrafficChange, VersionState
from schemas.telemetry import SessionLoad

SERVICES = 200
"""Services with a row, the first ones by name; the page says so, and `dmsc service list` has all."""
VERSIONS = 20
"""Versions of one service with a row: those with traffic or in shadow, then the newest."""
CHANGES = 20
"""Changes of traffic of one service, the newest first."""
KEPT = 4_000
"""Versions of which gateways' figures are kept, each gateway's apart; of more, those heard longest ago go."""
_OVER = (VersionState.RETIRED, VersionState.REFUSED)


@dataclass(frozen=True, kw_only=True)
class FiguresTimes:
    """Over which time figures are shown, in seconds."""

    window_s: float = 30.0  # of rates and percentiles: long enough for a few requests, short enough to follow


@dataclass(frozen=True, slots=True)
class _Told:
    at: float
    figures: VersionFigures


@dataclass(slots=True)
class _Spell:
    """What one gateway told of one version since it began to count."""

    since: float
    told: deque[_Told]


@dataclass(frozen=True, slots=True)
class Lately:
    """What happened to a version in the window, over all gateways; rates are per second."""

    requests: Mapping[str, float]
    counts: Mapping[str, int]
    tokens: float
    first_token: tuple[int, ...]
    sessions: int
    waiting: int


class ServiceFiguresBook:
    """The figures of all gateways. Times are seconds since the epoch."""

    def __init__(self, times: FiguresTimes = FiguresTimes()) -> None:
        self._times = times
        self._spells: dict[tuple[str, str, str], _Spell] = {}

    def take(self, message: ServiceFigures, at: float) -> None:
        """Takes a gateway's message in."""
        for figures in message.versions:
            key = (figures.service, figures.version, message.gateway)
            spell = self._spells.pop(key, None)
            if spell is None or spell.since != message.since:
                spell = _Spell(message.since, deque())
            self._spells[key] = spell
            spell.told.append(_Told(at, figures))
            # The newest one before the window stays: what came since then is the difference to it.
            while len(spell.told) > 1 and spell.told[1].at <= at - self._times.window_s:
                spell.told.popleft()
        while len(self._spells) > KEPT:
            del self._spells[next(iter(self._spells))]

    def lately(
        self, services: Collection[str], gateways: Collection[str], now: float
    ) -> dict[tuple[str, str], Lately]:
        """(service, version) → what happened lately. `gateways`: those that are there."""
        found: dict[tuple[str, str], list[_Spell]] = {}
        for (service, version, gateway), spell in self._spells.items():
            if service in services and gateway in gateways:
                found.setdefault((service, version), []).append(spell)
        return {key: self._sum(spells, now) for key, spells in found.items()}

    def _sum(self, spells: Iterable[_Spell], now: float) -> Lately:
        per_s: defaultdict[str, float] = defaultdict(float)
        counts: Counter[str] = Counter()
        first_token = [0] * (len(FIRST_TOKEN_S) + 1)
        tokens = 0.0
        sessions = waiting = 0
        for spell in spells:
            last = spell.told[-1].figures
            before, elapsed_s = self._before(spell, now)
            for outcome, times in last.requests.items():
                more = max(0, times - (before.requests.get(outcome, 0) if before else 0))
                counts[outcome] += more
                per_s[outcome] += more / elapsed_s
            tokens += max(0, last.tokens - (before.tokens if before else 0)) / elapsed_s
            for place, times in enumerate(last.first_token[: len(first_token)]):
                known = before.first_token[place] if before and place < len(before.first_token) else 0
                first_token[place] += max(0, times - known)
            sessions += last.sessions
            waiting += last.waiting
        return Lately(dict(per_s), +counts, tokens, tuple(first_token), sessions, waiting)

    def _before(self, spell: _Spell, now: float) -> tuple[VersionFigures | None, float]:
        """The figures at the window's begin, None if the gateway began later; and the seconds since then."""
        begin = now - self._times.window_s
        before = None
        for told in spell.told:
            if told.at > begin:
                break
            before = told
        if before is not None:
            return before.figures, self._times.window_s
        if spell.since > begin:
            return None, max(1.0, now - spell.since)
        first = spell.told[0]  # what it had answered before is not known to be of the window
        return first.figures, max(1.0, now - first.at)


class ServicesView:
    """What is known of services: `known`, the records of all that there are, and `figures` of gateways."""

    def __init__(self) -> None:
        self.known: tuple[ModelService, ...] = ()
        self.figures = ServiceFiguresBook()

    def rows(
        self,
        records: Mapping[str, ServiceRecord],
        reporting: Iterable[tuple[ServiceRecord, LastReport]],
        now: float,
    ) -> list[Row]:
        """The rows of all services.

        Args:
            records: the registry's present records, by SID.
            reporting: the instances that sent a sample lately, each with that sample.
            now: seconds since the epoch.
        """
        loads: dict[str, list[SessionLoad]] = {}
        for record, report in reporting:
            if report.sample.serving is not None and record.job is not None:
                loads.setdefault(record.job, []).append(report.sample.serving)
        names = {service.service for service in self.known}
        gateways = {sid for sid, each in records.items() if each.kind is EntityKind.GATEWAY}
        return list(service_rows(self.known, self.figures.lately(names, gateways, now), loads))


def service_rows(
    services: Iterable[ModelService],
    lately: Mapping[tuple[str, str], Lately],
    loads: Mapping[str, Iterable[SessionLoad]],
) -> Iterator[Row]:
    """The rows of services, by name, at most `SERVICES`.

    `loads`: job → what its instances said of themselves in their last samples.
    """
    for service in sorted(services, key=lambda each: each.service)[:SERVICES]:
        shown = sorted(service.versions, key=lambda each: _rank(service, each))[:VERSIONS]
        yield {
            "service": service.service,
            "user": service.user,
            "tenant": service.tenant,
            "state": service.state.value,
            "stable": service.stable,
            "revision": service.revision,
            "versions": [
                _version_row(
                    service,
                    version,
                    lately.get((service.service, version.version)),
                    tuple(loads.get(version.job, ())),
                )
                for version in shown
            ],
            "more_versions": len(service.versions) - len(shown),
            "history": [_change_row(change) for change in service.history[: -CHANGES - 1 : -1]],
        }


def _rank(service: ModelService, version: ServedVersion) -> tuple[bool, bool, float]:
    asked = version.version in service.weights or version.version in service.shadow
    return not (asked or version.version == service.stable), version.state in _OVER, -version.since


def _version_row(
    service: ModelService, version: ServedVersion, lately: Lately | None, loads: tuple[SessionLoad, ...]
) -> Row:
    row: Row = {
        "version": version.version,
        "job": version.job,
        "state": version.state.value,
        "reason": version.reason,
        "weight": service.weights.get(version.version, 0) / WHOLE,
        "shadow": version.version in service.shadow,
        "stable": version.version == service.stable,
        "kind": version.kind,
        "replicas": list(version.replicas),
        "exact": version.exact,
        "inexact_because": version.inexact_because,
        "uncached_because": version.uncached_because if version.cached is False else "",
        "sha256": version.sha256[:12],
        "context": version.context,
        "since": round(version.since, 1),
    }
    rows = sum(load.rows for load in loads)
    if rows:
        row["cache_rows"] = rows
        row["cache_used"] = rounded(1 - sum(load.free_rows for load in loads) / rows)
    if lately is not None:
        errors = {name: times for name, times in lately.counts.items() if name not in ("ok", "cancelled")}
        failing = sum(per_s for name, per_s in lately.requests.items() if name in errors)
        row |= {
            "requests_per_s": significant(sum(lately.requests.values())),
            "errors_per_s": significant(failing),
            "errors": errors,
            "tokens_per_s": significant(lately.tokens),
            "first_token_s": [significant(quantile_s(lately.first_token, part)) for part in (0.5, 0.95)],
            "sessions": lately.sessions,
            "waiting": lately.waiting,
        }
    return row


def _change_row(change: TrafficChange) -> Row:
    return {
        "at": round(change.at, 1),
        "by": change.by,
        "why": change.why,
        "weights": {version: weight / WHOLE for version, weight in change.weights.items()},
        "shadow": list(change.shadow),
    }


def quantile_s(counts: Collection[int], part: float) -> float | None:
    """The `part`-quantile (0..1) of a histogram with the bounds `FIRST_TOKEN_S`, in seconds.

    Within a bin values count as evenly spread, as in Prometheus. None without values; the largest bound where
    it lies beyond.
    """
    wanted = part * sum(counts)
    if not wanted:
        return None
    below = 0
    for place, count in enumerate(counts):
        if below + count >= wanted and place < len(FIRST_TOKEN_S):
            low = FIRST_TOKEN_S[place - 1] if place else 0.0
            return low + (FIRST_TOKEN_S[place] - low) * (wanted - below) / count
        below += count
    return FIRST_TOKEN_S[-1]
