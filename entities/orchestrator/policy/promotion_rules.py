"""Which version of a module is active after a promotion, and whether it stays (ADR-0021). Pure.

The version that was active before goes on in shadow, so that both are scored on the same traffic. If the
scores of the promoted version are worse by a margin, and by more than chance explains, it is rolled back.
That happens once: after a roll-back no version is on trial.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from schemas.errors import BadInput, Conflict, NotFound
from schemas.policy import ModuleRecord, ModuleState, PolicyScore

CAN_LEAD = (ModuleState.ACTIVE, ModuleState.SHADOW)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromotionConfig:
    """When a promoted version is rolled back."""

    min_scores: int = 20
    """Scores of each version before they are compared. Fewer reacts sooner, also to a run of bad luck."""

    window: int = 200
    """Scores of each version that count, the latest. More is steadier, and later when things change."""

    margin: float = 0.05
    """How much worse the mean score must be. A score is 0…1, 0.5 is as good as doing nothing."""

    z: float = 3.0
    """By how many standard errors it must be worse; more than the usual 2, as each score is another test."""

    def __post_init__(self) -> None:
        if not (2 <= self.min_scores <= self.window and 0 <= self.margin <= 1 and self.z >= 0):
            raise BadInput("promotion: need 2 ≤ min_scores ≤ window, 0 ≤ margin ≤ 1, z ≥ 0")


@dataclass(slots=True)
class PromotionTrial:
    """The scores of suggestions since the promotion, by version; each suggestion counts once, by its id."""

    since: float
    scores: dict[str, deque[float]] = field(default_factory=dict)
    _seen: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=4096))

    def take(self, score: PolicyScore, record: ModuleRecord, config: PromotionConfig) -> bool:
        """Counts a score; returns whether it counts.

        It must be new, have a value, and be of a suggestion that one of the two versions made after the
        promotion.
        """
        if score.score is None or score.at < self.since:
            return False
        if score.version not in (record.active, record.previous):
            return False
        key = (score.version, score.suggestion or f"{score.at}")
        if key in self._seen:
            return False
        self._seen.append(key)
        self.scores.setdefault(score.version, deque(maxlen=config.window)).append(score.score)
        return True


def promote(
    record: ModuleRecord | None,
    standings: Mapping[str, ModuleState],
    module: str,
    version: str,
    *,
    by: str,
    reason: str,
    now: float,
) -> ModuleRecord:
    """The record that makes `version` active; the former version is compared with it, if it runs.

    Args:
        record: the present record; None if nothing was promoted yet.
        standings: the state of each running version of the module.
        module: its name.
        version: the version to promote.
        by: who promotes it.
        reason: why, in words.
        now: seconds since the epoch.

    Raises:
        NotFound: that version does not run.
        Conflict: it is suspended, or about to leave.
    """
    state = standings.get(version)
    if state is None:
        running = ", ".join(sorted(standings)) or "none"
        raise NotFound(f"{module} {version} does not run (running versions: {running})", module=module)
    if state not in CAN_LEAD:
        raise Conflict(f"{module} {version} is {state.value}: only one that is active or in shadow can lead")
    if record is not None and record.active == version:
        return record
    before = active_version(record, standings)
    previous = before if before != version else ""
    return ModuleRecord(
        module=module,
        active=version,
        previous=previous,
        since=now,
        by=by,
        reason=reason,
        trial=previous in standings,
    )


def roll_back(
    record: ModuleRecord | None,
    standings: Mapping[str, ModuleState],
    module: str,
    *,
    by: str,
    reason: str,
    now: float,
) -> ModuleRecord:
    """The record that makes the former version active again; no version is on trial then.

    Raises:
        Conflict: nothing was promoted, or the former version does not run any more.
    """
    if record is None or not record.previous:
        raise Conflict(f"nothing of {module} was promoted: there is no version to go back to")
    if standings.get(record.previous) not in CAN_LEAD:
        raise Conflict(f"{module} {record.previous} does not run any more: start it, then roll back")
    return ModuleRecord(
        module=module, active=record.previous, previous=record.active, since=now, by=by, reason=reason
    )


def active_version(record: ModuleRecord | None, standings: Mapping[str, ModuleState]) -> str:
    """The version whose suggestions are adopted now; of several the first by name; '' if there is none."""
    if record is not None:
        return record.active
    active = sorted(version for version, state in standings.items() if state is ModuleState.ACTIVE)
    return active[0] if active else ""


def verdict(trial: PromotionTrial, record: ModuleRecord, config: PromotionConfig) -> str:
    """Why the promoted version must be rolled back; empty if it need not be.

    This is Welch's comparison of two means. Each variance counts one more observation at the edge of [0, 1],
    because twenty equal scores do not make a difference certain.
    """
    ours, theirs = trial.scores.get(record.active, ()), trial.scores.get(record.previous, ())
    if not record.trial or min(len(ours), len(theirs)) < config.min_scores:
        return ""
    mean, before = _mean(ours), _mean(theirs)
    error = math.sqrt(_variance(ours, mean) / len(ours) + _variance(theirs, before) / len(theirs))
    if before - mean < config.margin or before - mean <= config.z * error:
        return ""
    return (
        f"its score is {mean:.2f} (of {len(ours)}), {record.previous}'s {before:.2f} (of {len(theirs)}) "
        "on the same traffic"
    )


def disagreeing(
    records: Mapping[str, ModuleRecord], standings: Mapping[tuple[str, str], ModuleState]
) -> list[tuple[str, str, ModuleState]]:
    """(module, version, state that it should have) of each version whose state differs from its record."""
    differing = []
    for (module, version), state in sorted(standings.items()):
        record = records.get(module)
        if record is None or state not in CAN_LEAD:
            continue
        target = ModuleState.ACTIVE if version == record.active else ModuleState.SHADOW
        if state is not target:
            differing.append((module, version, target))
    return differing


def _mean(scores: Iterable[float]) -> float:
    values = list(scores)
    return sum(values) / len(values)


def _variance(scores: Iterable[float], mean: float) -> float:
    values = list(scores)
    return (sum((value - mean) ** 2 for value in values) + 0.25) / len(values)
