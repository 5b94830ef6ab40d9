"""Fail-slow: an instance that became slower than it was, while the others did not (Gunawi et al., FAST 2018).

Each instance is judged by itself: its service time against its own baseline, and that against how the
job's other instances stand to theirs, so that neither a slow device, nor a machine that is busy for
everybody, nor a harder phase of the data is blamed. A verdict needs several samples in a row, each with new
work in it; so does its end. Pure: no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True)
class FailSlowConfig:
    """When an instance is called slow."""

    warmup: int = 3  # samples before a baseline stands; the first microbatches are never typical
    factor: float = 2.0  # times its baseline, beside the others: below, windows and routes even it out
    over: float = 1.4  # back below this it is well again; the gap to `factor` is the hysteresis
    confirm: int = 3  # samples in a row, for either; one comes with each step
    settles: int = 10  # samples until a baseline only creeps: before, what was slow at first is forgotten
    creep: float = 0.02  # part by which it follows each sample then: the job's phases move all of them alike,
    # which needs no following, and one that ages over an hour is not news

    def __post_init__(self) -> None:
        if not 1 < self.over < self.factor:
            raise ValueError(f"over {self.over} must be between 1 and factor {self.factor}")


@dataclass(frozen=True, kw_only=True)
class SlowVerdict:
    """`slow` or well again, and the figures it was judged by."""

    sid: str
    incarnation: str
    slow: bool
    usual_ms: float
    evidence: str


@dataclass(slots=True)
class _Observed:
    incarnation: str
    present_ms: float = 0.0
    baseline_ms: float = 0.0
    samples: int = 0
    microbatches: int = -1
    strikes: int = 0
    slow: bool = False

    @property
    def ratio(self) -> float:
        return self.present_ms / self.baseline_ms


class FailSlow:
    """The instances of one job."""

    def __init__(self, config: FailSlowConfig = FailSlowConfig()) -> None:
        self._config = config
        self._instances: dict[str, _Observed] = {}

    def observe(self, sid: str, incarnation: str, service_ms: float, microbatches: int) -> SlowVerdict | None:
        """A sample; what it changes about this instance.

        Args:
            sid, incarnation: of the instance.
            service_ms: its moving average per microbatch; above 0.
            microbatches: how many it has done in all: without new ones a sample says nothing.
        """
        config = self._config
        held = self._instances.get(sid)
        if held is None or held.incarnation != incarnation:
            held = self._instances[sid] = _Observed(incarnation)
        if service_ms <= 0 or microbatches == held.microbatches:
            return None
        held.microbatches = microbatches
        held.present_ms = service_ms
        held.samples += 1
        if held.samples <= config.warmup:
            held.baseline_ms = service_ms
            return None
        others = self._others(sid)
        beside = held.ratio / others
        struck = beside < config.over if held.slow else beside >= config.factor
        held.strikes = held.strikes + 1 if struck else 0
        if not held.slow and beside < config.over:
            rate = 0.2 if held.samples <= config.settles else config.creep
            held.baseline_ms += rate * (service_ms - held.baseline_ms)
        if held.strikes < config.confirm:
            return None
        held.slow, held.strikes = not held.slow, 0
        return SlowVerdict(
            sid=sid,
            incarnation=incarnation,
            slow=held.slow,
            usual_ms=held.baseline_ms,
            evidence=self._evidence(sid, held, others),
        )

    def resume(self, sid: str, incarnation: str, usual_ms: float) -> None:
        """This one was found slow before we came."""
        self._instances[sid] = _Observed(
            incarnation, baseline_ms=usual_ms, samples=self._config.settles, slow=True
        )

    def forget(self, sid: str) -> None:
        self._instances.pop(sid, None)

    def _others(self, sid: str) -> float:
        """How the job's other instances stand to their baselines: the median of them; 1 without any."""
        ratios = [
            one.ratio
            for other, one in self._instances.items()
            if other != sid and one.samples > self._config.warmup and not one.slow
        ]
        return max(median(ratios), 0.1) if ratios else 1.0

    def _evidence(self, sid: str, held: _Observed, others: float) -> str:
        now = (
            f"{held.present_ms:.1f} ms per microbatch, {held.ratio:.1f}× its usual {held.baseline_ms:.1f} ms"
        )
        beside = f"the job's others stand at {others:.1f}× theirs; {self._config.confirm} samples in a row"
        return f"{sid} {'has become slow' if held.slow else 'is well again'}: {now}; {beside}"
