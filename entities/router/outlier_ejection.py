"""Outlier ejection with slow return, as Envoy does it: who keeps failing gets no work for a while.

Links to it that break, or transfers that take many times what they take to its peers, count against an
instance; when enough have come together it is ejected: weight 0. It comes back by itself, first with part of
its weight, and each ejection after another lasts longer. Never more than a part of a stage at once, never its
last instance. Slowness is no reason: a slow instance has its fair share (`fail_slow` reports it). Pure: time
comes in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low

from schemas.step import Member


@dataclass(frozen=True, kw_only=True)
class EjectionConfig:
    """When and for how long."""

    faults: int = 3  # within `window_s`; a single broken link is built anew and nobody's fault
    window_s: float = 30.0
    latency_factor: float = 10.0  # times its peers' latency, with `latency_ms` more at least: a fault
    latency_ms: float = 500.0
    base_s: float = 10.0  # the first ejection; the n-th in a row lasts n times that
    most_s: float = 120.0
    most_part: float = 0.5  # of a stage's instances ejected at once; always one fewer than there are
    ramp_s: float = 10.0  # from part of its weight to all of it
    steps: int = 4  # weights on that way, so that a return costs as many tables and no more
    forgiven_s: float = 300.0  # without an ejection, the next one counts as the first

    def __post_init__(self) -> None:
        if not 0 <= self.most_part < 1:
            raise ValueError(f"most_part is {self.most_part}; it must be in [0, 1)")


@dataclass(frozen=True, slots=True)
class InstanceHealth:
    """Part of its weight that an instance gets, and why it is not all."""

    factor: float = 1.0
    reason: str = ""


WELL = InstanceHealth()


@dataclass(slots=True)
class _Ejectable:
    faults: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=16))
    until: float = -math.inf
    times: int = 0
    why: str = ""

    def recent(self, now: float, window_s: float) -> list[str]:
        return [why for at, why in self.faults if now - at <= window_s]


class Ejection:
    """The instances of one stage, for the senders of one cluster."""

    def __init__(self, config: EjectionConfig = EjectionConfig()) -> None:
        self._config = config
        self._instances: dict[Member, _Ejectable] = {}

    def failed(self, member: Member, why: str, now: float) -> None:
        """A link to it broke, or could not be built."""
        self._instances.setdefault(member, _Ejectable()).faults.append((now, why))

    def measured(self, latency_ms: dict[Member, float], now: float) -> None:
        """Latencies of all (0: not known), once a while: far outliers fail. O(members)."""
        config = self._config
        known = [ms for ms in latency_ms.values() if ms > 0]
        if len(known) < 2:
            return
        peers = median_low(known)
        for member, ms in latency_ms.items():
            if ms > config.latency_factor * peers and ms > peers + config.latency_ms:
                self.failed(member, f"transfers take {ms:.0f} ms, {ms / peers:.0f}× its peers'", now)

    @property
    def suspects(self) -> bool:
        """Whether anybody has failed, ever: else all are well, and nobody need be looked at."""
        return bool(self._instances)

    def health(self, members: Sequence[Member], now: float) -> dict[Member, InstanceHealth]:
        """How all of a stage are now; ejects who has failed often enough. Forgets who is not named."""
        config = self._config
        named = frozenset(members)
        self._instances = {one: held for one, held in self._instances.items() if one in named}
        out = sum(held.until > now for held in self._instances.values())
        most = min(int(len(members) * config.most_part), len(members) - 1)
        for held in self._instances.values():
            if held.until > now or len(held.recent(now, config.window_s)) < config.faults or out >= most:
                continue
            held.times = 1 if now - held.until > config.forgiven_s else held.times + 1
            held.until = now + min(config.base_s * held.times, config.most_s)
            held.why = held.faults[-1][1]
            held.faults.clear()
            out += 1
        return {member: self._of(member, now) for member in members}

    def _of(self, member: Member, now: float) -> InstanceHealth:
        config, held = self._config, self._instances.get(member)
        if held is None or math.isinf(held.until):
            return WELL
        if held.until > now:
            held.faults.clear()  # what comes in still is of the same cause
            return InstanceHealth(
                0.0, f"ejected for {held.until - now:.0f} s more ({held.times}.): {held.why}"
            )
        step = int((now - held.until) / config.ramp_s * config.steps) if config.ramp_s > 0 else config.steps
        if step >= config.steps:
            return WELL
        return InstanceHealth((step + 1) / (config.steps + 1), "coming back after an ejection")
