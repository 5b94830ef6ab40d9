"""How many refusals are recorded one by one, so that nobody can fill the audit stream by being refused. Pure.

Each user has a few records per window, and all strangers together have as many; what comes beyond is counted,
and told in one record at the window's end. So nothing is lost silently, and the stream grows by at most
`(each + 1) * (users + 2)` records per window.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class FoldingConfig:
    """Bounds: 17 groups × 4 records of 0.7 kB in 5 minutes are 14 MB a day at most."""

    window_s: float = 300.0
    each: int = 3  # recorded one by one, per user and window
    users: int = 16  # told apart; the others are counted together


@dataclass(slots=True)
class Folded:
    """What was not recorded one by one."""

    user: str
    count: int = 0
    action: str = ""  # of the last one
    resource: str = ""
    reason: str = ""


OTHERS = "*"
"""In place of a name: all users beyond those that are told apart."""


@dataclass(slots=True)
class Folding:
    """The present window. Times are any clock's seconds, handed in."""

    config: FoldingConfig = field(default_factory=FoldingConfig)
    _ends: float = 0.0
    _seen: dict[str, int] = field(default_factory=dict)
    _folded: dict[str, Folded] = field(default_factory=dict)

    def take(self, user: str, action: str, resource: str, reason: str, now: float) -> bool:
        """Counts a refusal; True where it is to be recorded by itself."""
        if not self._seen:
            self._ends = now + self.config.window_s
        key = user if user in self._seen or len(self._seen) < self.config.users else OTHERS
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= self.config.each:
            return True
        folded = self._folded.setdefault(key, Folded(key))
        folded.count += 1
        folded.action, folded.resource, folded.reason = action, resource, reason
        return False

    def due(self, now: float) -> float | None:
        """Seconds until the window ends; None where nothing was refused in it."""
        return max(0.0, self._ends - now) if self._seen else None

    def close(self) -> list[Folded]:
        """Ends the window; what is to be told of it."""
        folded = list(self._folded.values())
        self._seen, self._folded = {}, {}
        return folded
