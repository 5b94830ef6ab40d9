"""Circuit breaker and retry budget for an entity that does not answer (Nygard, *Release It!*). Pure.

A breaker is closed while answers come. It opens when most of the last calls failed, refuses at once while
open, and lets one call through to probe whether the entity is back. A budget limits repetitions to a share of
the calls, so that an overloaded entity does not get more requests the slower it becomes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class BreakerState(StrEnum):
    """The state of one breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, kw_only=True)
class BreakerConfig:
    """When a breaker opens and for how long."""

    window_s: float = 10.0  # older calls are ignored
    failures: int = 5  # it opens after at least so many failures …
    ratio: float = 0.5  # … that are at least this share of the calls in the window
    open_s: float = 1.0  # how long it is open the first time; doubles with each failed probe
    longest_open_s: float = 8.0  # a service that comes back is probed within this

    def __post_init__(self) -> None:
        if not (0 < self.ratio <= 1 and self.failures >= 1 and 0 < self.open_s <= self.longest_open_s):
            raise ValueError("a breaker needs failures ≥ 1, 0 < ratio ≤ 1 and 0 < open_s ≤ longest_open_s")


class Breaker:
    """The breaker of one entity. Times are monotonic seconds."""

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._calls: deque[tuple[float, bool]] = deque()
        self._failed = 0  # among `_calls`, counted along: a busy gateway has thousands of calls in the window
        self._open_s = self._config.open_s
        self._until = 0.0
        self._probing, self._probed_at = False, 0.0
        self.state = BreakerState.CLOSED
        self.opened = 0

    def admit(self, now: float) -> float | None:
        """None admits the call, whose outcome then goes to `record`; else the seconds until the next try."""
        if self.state is BreakerState.OPEN and now >= self._until:
            self.state = BreakerState.HALF_OPEN
            self._probing = False
        if self.state is BreakerState.OPEN:
            return self._until - now
        if self.state is BreakerState.HALF_OPEN:
            if self._probing and now < self._probed_at + self._config.longest_open_s:
                return self._open_s
            self._probing, self._probed_at = True, now  # one that lasts, such as a plan, keeps nobody out
        return None

    def record(self, ok: bool | None, now: float) -> None:
        """Records the outcome of an admitted call. `ok` None: it was cut short and says nothing."""
        if self.state is BreakerState.HALF_OPEN:
            self._probing = False
            if ok:
                self.state, self._open_s = BreakerState.CLOSED, self._config.open_s
                self._forget()
            elif ok is not None:
                self._open_s = min(2 * self._open_s, self._config.longest_open_s)
                self._open(now)
            return
        if ok is None or self.state is BreakerState.OPEN:
            return  # a call from before it opened
        self._calls.append((now, ok))
        self._failed += not ok
        while self._calls and self._calls[0][0] < now - self._config.window_s:
            self._failed -= not self._calls.popleft()[1]
        if self._failed >= max(self._config.failures, self._config.ratio * len(self._calls)):
            self._open(now)

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        self._until = now + self._open_s
        self._forget()
        self.opened += 1

    def _forget(self) -> None:
        self._calls.clear()
        self._failed = 0


class RetryBudget:
    """A budget for repetitions: `ratio` of the calls plus `per_s` a second, and at most `reserve` at once.

    It works like Finagle's. A refused repetition may be tried again later: a waiting call is repeated less
    often, not never.
    """

    def __init__(self, ratio: float = 0.2, per_s: float = 10.0, reserve: float = 20.0) -> None:
        self._ratio = ratio
        self._per_s = per_s
        self._reserve = reserve
        self._level = reserve
        self._at: float | None = None
        self.repeated = 0
        self.refused = 0

    def earn(self) -> None:
        """Adds a call's share to the budget."""
        self._level = min(self._reserve, self._level + self._ratio)

    def spend(self, now: float) -> bool:
        """Whether a call may be repeated once more at `now` (monotonic seconds)."""
        gained = 0.0 if self._at is None else max(0.0, now - self._at) * self._per_s
        self._level, self._at = min(self._reserve, self._level + gained), now
        if self._level < 1.0:
            self.refused += 1
            return False
        self._level -= 1.0
        self.repeated += 1
        return True
