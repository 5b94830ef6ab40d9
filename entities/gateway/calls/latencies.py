"""How long a service takes for an answer, of the last requests. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque

LEAST = 20
"""Requests below which a percentile says nothing."""
KEPT = 256
"""Last requests of a service that count."""


class ServiceLatencies:
    """The last latencies of each service, of at most `most` services; the least recently used are dropped."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._last: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, service: str, seconds: float) -> None:
        self._last.setdefault(service, deque(maxlen=KEPT)).append(seconds)
        self._last.move_to_end(service)
        while len(self._last) > self._most:
            self._last.popitem(last=False)

    def p95_s(self, service: str) -> float | None:
        """Seconds within which 95 of 100 requests were answered; None: too few are known."""
        known = sorted(self._last.get(service, ()))
        return known[int(0.95 * len(known))] if len(known) >= LEAST else None
