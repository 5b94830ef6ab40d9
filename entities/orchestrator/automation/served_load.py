"""What gateways say of versions of services, put together for each of them. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

from entities.orchestrator.automation.version_load import VersionLoad
from schemas.serve_spec import ServeSpec
from schemas.services.figures import ServiceFigures, VersionFigures
from schemas.telemetry import SessionLoad


@dataclass(slots=True)
class _GatewayFigures:
    """What one gateway said last of one version."""

    figures: VersionFigures
    since: float
    at: float
    tokens_per_s: float = 0.0


@dataclass(slots=True)
class _Version:
    gateways: dict[str, _GatewayFigures] = field(default_factory=dict)
    refused: deque[tuple[float, int]] = field(default_factory=deque)
    asked_at: float = -float("inf")


class ServedLoad:
    """The loads of all versions, by job. Times are seconds of one clock.

    Args:
        refused_s: For so long a request that found no room counts as one that still wants some.
        unheard_s: A gateway that said nothing of a version for so long answers nothing of it, and what
            it said of instances' loads is too old: it repeats itself each 5 s while an answer is under way.
    """

    def __init__(self, refused_s: float = 5.0, unheard_s: float = 15.0) -> None:
        self._refused_s = refused_s
        self._unheard_s = unheard_s
        self._versions: defaultdict[str, _Version] = defaultdict(_Version)

    def take(self, message: ServiceFigures, now: float) -> None:
        """Takes what a gateway says."""
        for figures in message.versions:
            version = self._versions[figures.job]
            before = version.gateways.get(message.gateway)
            latest = version.gateways[message.gateway] = _GatewayFigures(figures, message.since, now)
            # A gateway that began anew counts from nothing.
            known = before is not None and before.since == message.since
            former = (
                before.figures
                if before is not None and known
                else VersionFigures(service=figures.service, version=figures.version, job=figures.job)
            )
            if before is not None and known and now > before.at:
                latest.tokens_per_s = max(0, figures.tokens - former.tokens) / (now - before.at)
            if known and (refused := figures.refused - former.refused) > 0:
                version.refused.append((now, refused))
            if figures.sessions or _over(figures) > _over(former):
                version.asked_at = now

    def forget(self, jobs: Iterable[str]) -> None:
        """These jobs are over."""
        for job in jobs:
            self._versions.pop(job, None)

    @property
    def jobs(self) -> tuple[str, ...]:
        """Of which something was said."""
        return tuple(self._versions)

    def of(self, job: str, stages: Mapping[str, int], serve: ServeSpec, now: float) -> VersionLoad:
        """The load of a version.

        Args:
            job: Its job.
            stages: SID → stage of its instances.
            serve: The section of its job file.
            now: The present.
        """
        version = self._versions.get(job)
        if version is None:
            return VersionLoad(room=serve.sessions)
        while version.refused and now - version.refused[0][0] > self._refused_s:
            version.refused.popleft()
        for gone in [name for name, each in version.gateways.items() if now - each.at > self._unheard_s]:
            del version.gateways[gone]
        told = list(version.gateways.values())
        sessions = sum(each.figures.sessions for each in told)
        if sessions:
            version.asked_at = now
        by_stage: defaultdict[int, list[SessionLoad]] = defaultdict(list)
        loads: dict[str, SessionLoad] = {}
        for gateway in sorted(told, key=lambda each: each.at):  # who spoke last knows best
            loads |= gateway.figures.loads
        for sid, load in loads.items():
            if sid in stages:
                by_stage[stages[sid]].append(load)
        single_passes = bool(by_stage) and not any(load.rows for loads in by_stage.values() for load in loads)
        return VersionLoad(
            sessions=sessions,
            # A client that is refused asks again each second: it counts once.
            refused=max((count for _, count in version.refused), default=0),
            room=serve.batch if single_passes else serve.sessions,
            used=max(map(_used, by_stage.values()), default=0.0),
            token_ms=sum(fmean(load.wave_ms for load in loads) for loads in by_stage.values()),
            tokens_per_s=sum(each.tokens_per_s for each in told if each.figures.sessions),
            asked_at=version.asked_at,
        )


def _over(figures: VersionFigures) -> int:
    return sum(figures.requests.values())


def _used(loads: Iterable[SessionLoad]) -> float:
    """Part of the rows of a stage's replicas that is in use."""
    loads = list(loads)
    rows = sum(load.rows for load in loads)
    return 1.0 - sum(min(load.free_rows, load.rows) for load in loads) / rows if rows else 0.0
