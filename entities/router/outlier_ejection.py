"""Outlier ejection with slow return, as in Envoy: an instance that keeps failing gets no work for a while.

A broken link to an instance, and a transfer that takes many times as long as to its peers, count as faults.
With enough faults in a window the instance is ejected: it gets weight 0. It comes back by itself, first with
part of its weight, and repeated ejections last longer. At most a share of a stage is ejected at once, and
never its last instance. Slow computing is no fault: a slow instance gets its fair share (`fail_slow` reports
it). Pure: the time comes in.
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
    """When an instance is ejected, and for how long."""

    faults: int = 3  # within `window_s`; a single broken link is rebuilt and proves nothing
    window_s: float = 30.0
    latency_factor: float = 10.0  # times its peers' latency, and at least `latency_ms` more, is a fault
    latency_ms: float = 500.0
    base_s: float = 10.0  # the first ejection; the n-th in a row lasts n times as long
    most_s: float = 120.0  # longest ejection
    most_part: float = 0.5  # share of a stage's instances ejected at once; one instance always stays
    ramp_s: float = 10.0  # from part of its weight to all of it
    steps: int = 4  # weights during the ramp: a return costs this many route tables
    forgiven_s: float = 300.0  # after so long without an ejection, the next one counts as the first

    def __post_init__(self) -> None:
        if not 0 <= self.most_part < 1:
            raise ValueError(f"most_part is {self.most_part}; it must be in [0, 1)")


@dataclass(frozen=True, slots=True)
class InstanceHealth:
    """The share of its weight that an instance gets, and why it is not all."""

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
        """Count a fault: a link to the instance broke or could not be built."""
        self._instances.setdefault(member, _Ejectable()).faults.append((now, why))

    def measured(self, latency_ms: dict[Member, float], now: float) -> None:
        """Count a fault for each far outlier among all latencies (0: unknown). Called periodically, O(n)."""
        config = self._config
        latencies = [ms for ms in latency_ms.values() if ms > 0]
        if len(latencies) < 2:
            return
        peers = median_low(latencies)
        for member, ms in latency_ms.items():
            if ms > config.latency_factor * peers and ms > peers + config.latency_ms:
                self.failed(member, f"transfers take {ms:.0f} ms, {ms / peers:.0f}× its peers'", now)

    @property
    def suspects(self) -> bool:
        """Whether any instance has a fault on record; if not, all are well."""
        return bool(self._instances)

    def health(self, members: Sequence[Member], now: float) -> dict[Member, InstanceHealth]:
        """The health of all instances of a stage; ejects those with enough faults.

        Instances that are not among `members` are forgotten.
        """
        config = self._config
        present = frozenset(members)
        self._instances = {
            member: instance for member, instance in self._instances.items() if member in present
        }
        ejected = sum(instance.until > now for instance in self._instances.values())
        limit = min(int(len(members) * config.most_part), len(members) - 1)
        for instance in self._instances.values():
            faults = len(instance.recent(now, config.window_s))
            if instance.until > now or faults < config.faults or ejected >= limit:
                continue
            instance.times = 1 if now - instance.until > config.forgiven_s else instance.times + 1
            instance.until = now + min(config.base_s * instance.times, config.most_s)
            instance.why = instance.faults[-1][1]
            instance.faults.clear()
            ejected += 1
        return {member: self._health_of(member, now) for member in members}

    def _health_of(self, member: Member, now: float) -> InstanceHealth:
        config, instance = self._config, self._instances.get(member)
        if instance is None or math.isinf(instance.until):
            return WELL
        if instance.until > now:
            instance.faults.clear()  # faults during an ejection have the same cause
            return InstanceHealth(
                0.0, f"ejected for {instance.until - now:.0f} s more ({instance.times}.): {instance.why}"
            )
        since_s = now - instance.until
        step = int(since_s / config.ramp_s * config.steps) if config.ramp_s > 0 else config.steps
        if step >= config.steps:
            return WELL
        return InstanceHealth((step + 1) / (config.steps + 1), "coming back after an ejection")
