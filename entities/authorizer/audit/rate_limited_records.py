"""Limits how many refusals get a record each, so that refused clients can't fill the audit stream. Pure.

Refusals are grouped: at gateways, each user is a group, and all unknown users together; at the bus,
connections with the same name, host and reason are a group. Each group has a few records per window; further
refusals are counted and reported in one record at the end of the window. So nothing is lost silently, and the
stream grows by at most `(each + 1) * (groups + 1)` records per window.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RateLimitedRecordsConfig:
    """Bounds of records: 17 groups × 4 records of 0.7 kB in 5 minutes are 14 MB a day at most."""

    window_s: float = 300.0
    each: int = 3  # refusals with a record each, per group and window
    groups: int = 16  # separate groups; refusals of all others are counted together


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A refusal: which user was refused which action, and why. `user` is empty if unknown."""

    user: str = ""
    action: str = ""
    resource: str = ""
    reason: str = ""


@dataclass(slots=True)
class AggregatedRefusals:
    """The count of a group's refusals without a record each."""

    last: Refusal
    count: int = 0
    others: bool = False  # of several groups: those beyond the separate ones


class _OtherGroups:
    """The group of all refusals beyond the separate groups."""


@dataclass(slots=True)
class RateLimitedRecords:
    """The present window. Times are seconds of any clock, passed in."""

    config: RateLimitedRecordsConfig = field(default_factory=RateLimitedRecordsConfig)
    _window_end: float = 0.0
    _counts: dict[Hashable, int] = field(default_factory=dict)
    _aggregates: dict[Hashable, AggregatedRefusals] = field(default_factory=dict)

    def take(self, group: Hashable, refusal: Refusal, now: float) -> bool:
        """Count a refusal; True if it is to get a record of its own."""
        if not self._counts:
            self._window_end = now + self.config.window_s
        key = group if group in self._counts or len(self._counts) < self.config.groups else _OtherGroups
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] <= self.config.each:
            return True
        aggregate = self._aggregates.setdefault(key, AggregatedRefusals(refusal, others=key is _OtherGroups))
        aggregate.count += 1
        aggregate.last = refusal
        return False

    def due(self, now: float) -> float | None:
        """Seconds until the window ends; None if it has no refusal."""
        return max(0.0, self._window_end - now) if self._counts else None

    def close(self) -> list[AggregatedRefusals]:
        """End the window; return the counts to record."""
        aggregates = list(self._aggregates.values())
        self._counts, self._aggregates = {}, {}
        return aggregates
