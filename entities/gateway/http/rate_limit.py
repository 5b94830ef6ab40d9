"""Rate limits of requests: one token bucket per identity (Turner 1986). Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRate:
    """`per_s` requests a second in the long run, `burst` at once."""

    per_s: float
    burst: int

    def __post_init__(self) -> None:
        if self.per_s <= 0 or self.burst < 1:
            raise ValueError("a rate needs per_s above 0 and a burst of at least 1")


@dataclass(frozen=True, slots=True)
class RateGrant:
    """The decision on one request.

    `reset_s`: seconds until the bucket is full again; `retry_s`: seconds until one more request is allowed.
    """

    allowed: bool
    limit: int
    remaining: int
    reset_s: float
    retry_s: float = 0.0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The `RateLimit-*` headers, and `Retry-After` for a refusal, in whole seconds as HTTP requires."""
        fields = [
            (b"ratelimit-limit", b"%d" % self.limit),
            (b"ratelimit-remaining", b"%d" % self.remaining),
            (b"ratelimit-reset", b"%d" % math.ceil(self.reset_s)),
        ]
        if not self.allowed:
            fields.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_s))))
        return fields


class Buckets:
    """One bucket per identity, at most `most` of them; the least recently used ones are dropped.

    A dropped bucket is full again when it comes back: with many identities the limit gets laxer, never
    stricter.
    """

    def __init__(self, rate: RequestRate, most: int = 10_000) -> None:
        self._rate = rate
        self._most = most
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, identity: str, now: float) -> RateGrant:
        """Takes one request of `identity` from its bucket at `now` (monotonic seconds)."""
        rate = self._rate
        level, at = self._levels.pop(identity, (float(rate.burst), now))
        level = min(float(rate.burst), level + max(0.0, now - at) * rate.per_s)
        allowed = level >= 1.0
        level -= allowed
        self._levels[identity] = (level, now)
        while len(self._levels) > self._most:
            self._levels.popitem(last=False)
        return RateGrant(
            allowed=allowed,
            limit=rate.burst,
            remaining=int(level),
            reset_s=(rate.burst - level) / rate.per_s,
            retry_s=0.0 if allowed else (1.0 - level) / rate.per_s,
        )

    def __len__(self) -> int:
        return len(self._levels)
