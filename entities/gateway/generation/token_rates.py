"""How many tokens of prompts and answers a user may have per second. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRate:
    """`per_s` tokens a second in the long run, `burst` at once."""

    per_s: float = 20_000.0
    burst: int = 1_000_000

    def __post_init__(self) -> None:
        if self.per_s <= 0 or self.burst < 1:
            raise ValueError("a rate needs per_s above 0 and a burst of at least 1")


class TokenBuckets:
    """One bucket per user, at most `most`. It may fall below zero: an answer's length is known at its end.

    A dropped bucket is full again when it comes back: with many users the limit gets laxer, never stricter.
    """

    def __init__(self, rate: TokenRate = TokenRate(), most: int = 10_000) -> None:
        self._rate = rate
        self._most = most
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, user: str, now: float) -> float:
        """Seconds until this user may ask again; 0: now. `now`: monotonic seconds."""
        level = self._level(user, now)
        return 0.0 if level > 0 else (1.0 - level) / self._rate.per_s

    def charge(self, user: str, tokens: int, now: float) -> None:
        level = self._level(user, now) - tokens
        self._levels[user] = (level, now)
        self._levels.move_to_end(user)
        while len(self._levels) > self._most:
            self._levels.popitem(last=False)

    def _level(self, user: str, now: float) -> float:
        burst = float(self._rate.burst)
        level, at = self._levels.get(user, (burst, now))
        return min(burst, level + max(0.0, now - at) * self._rate.per_s)
