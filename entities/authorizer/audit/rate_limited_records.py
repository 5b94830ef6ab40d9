"""How many refusals are recorded one by one, so that nobody can fill the audit stream by being refused. Pure.

Refusals come in groups: at the gateways' doors a user is one, and all strangers together; at the bus's door
whoever is refused as the same, from the same host, for the same reason. Each group has a few records per
window; what comes beyond is counted, and told in one record at the window's end. So nothing is lost silently,
and the stream grows by at most `(each + 1) * (groups + 1)` records per window.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RateLimitedRecordsConfig:
    """Bounds: 17 groups × 4 records of 0.7 kB in 5 minutes are 14 MB a day at most."""

    window_s: float = 300.0
    each: int = 3  # recorded one by one, per group and window
    groups: int = 16  # told apart; the others are counted together


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Who was refused what, and why. `user` is empty where nobody is known."""

    user: str = ""
    action: str = ""
    resource: str = ""
    reason: str = ""


@dataclass(slots=True)
class AggregatedRefusals:
    """What was not recorded one by one."""

    last: Refusal
    count: int = 0
    others: bool = False  # of several groups: those beyond what is told apart


class _Others:
    """In place of a group: all beyond those that are told apart."""


@dataclass(slots=True)
class RateLimitedRecords:
    """The present window. Times are any clock's seconds, handed in."""

    config: RateLimitedRecordsConfig = field(default_factory=RateLimitedRecordsConfig)
    _ends: float = 0.0
    _seen: dict[Hashable, int] = field(default_factory=dict)
    _folded: dict[Hashable, AggregatedRefusals] = field(default_factory=dict)

    def take(self, group: Hashable, refusal: Refusal, now: float) -> bool:
        """Counts a refusal; True where it is to be recorded by itself."""
        if not self._seen:
            self._ends = now + self.config.window_s
        key = group if group in self._seen or len(self._seen) < self.config.groups else _Others
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= self.config.each:
            return True
        folded = self._folded.setdefault(key, AggregatedRefusals(refusal, others=key is _Others))
        folded.count += 1
        folded.last = refusal
        return False

    def due(self, now: float) -> float | None:
        """Seconds until the window ends; None where nothing was refused in it."""
        return max(0.0, self._ends - now) if self._seen else None

    def close(self) -> list[AggregatedRefusals]:
        """Ends the window; what is to be told of it."""
        folded = list(self._folded.values())
        self._seen, self._folded = {}, {}
        return folded
