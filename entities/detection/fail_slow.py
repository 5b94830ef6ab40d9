"""Fail-slow: an instance became slower than it was, while the others did not (Gunawi et al., FAST 2018).

Each instance is judged by the ratio of its service time to its own baseline, relative to the same ratio of
the job's other instances, unless those became faster. So a device that was always slow, a machine that is
busy for all of them, a harder phase of the data and a wait for data are not blamed. Who is given other layers
is no slower for it: its baseline is learnt anew. A verdict needs several samples in a row, each with new work
in it; so does the end of slowness. Pure: no clock, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from statistics import median


@dataclass(frozen=True, kw_only=True)
class FailSlowConfig:
    """When an instance is called slow."""

    warmup: int = 3  # samples before a baseline stands; the first microbatches are never typical
    factor: float = 2.0  # times its baseline, relative to the others: below it windows and routes compensate
    over: float = 1.4  # below this it is well again; the gap to `factor` is the hysteresis
    confirm: int = 3  # samples in a row for a change of verdict; one comes with each step
    settles: int = 10  # samples until a baseline moves slowly: until then a slow start is forgotten
    creep: float = 0.02  # share of each sample in the baseline from then on: phases of the job change all
    # instances alike and need no following, and an instance that ages over an hour is no sudden fault

    def __post_init__(self) -> None:
        if not 1 < self.over < self.factor:
            raise ValueError(f"over {self.over} must be between 1 and factor {self.factor}")


@dataclass(frozen=True, kw_only=True)
class SlowVerdict:
    """The verdict `slow`, or well again if false, and its figures."""

    sid: str
    incarnation: str
    slow: bool
    usual_ms: float
    evidence: str


@dataclass(slots=True)
class _InstanceHistory:
    incarnation: str
    present_ms: float = 0.0
    baseline_ms: float = 0.0
    work_ms: float = 0.0
    samples: int = 0
    microbatches: int = -1
    strikes: int = 0
    slow: bool = False

    @property
    def ratio(self) -> float:
        return self.present_ms / self.baseline_ms

    def works(self, work_ms: float) -> None:
        """Its layers take so long by the analysis. Where that is new, they were cut anew."""
        if self.work_ms and work_ms and not isclose(work_ms, self.work_ms, rel_tol=0.01):
            self.strikes = 0
            if self.slow:  # until it is as fast again as its new layers let it be
                self.baseline_ms *= work_ms / self.work_ms
            else:
                self.samples = 0
        self.work_ms = work_ms or self.work_ms


class FailSlow:
    """Judges the instances of one job."""

    def __init__(self, config: FailSlowConfig = FailSlowConfig()) -> None:
        self._config = config
        self._instances: dict[str, _InstanceHistory] = {}

    def observe(
        self, sid: str, incarnation: str, service_ms: float, microbatches: int, work_ms: float = 0.0
    ) -> SlowVerdict | None:
        """Take a sample; return a verdict if it changes the one on this instance.

        Args:
            sid, incarnation: of the instance.
            service_ms: its moving average per microbatch; above 0.
            microbatches: how many it has done in all; a sample without new ones is ignored.
            work_ms: what a microbatch takes by the analysis, for the layers that it has now; 0: not known.
        """
        config = self._config
        instance = self._instances.get(sid)
        if instance is None or instance.incarnation != incarnation:
            instance = self._instances[sid] = _InstanceHistory(incarnation)
        instance.works(work_ms)
        if service_ms <= 0 or microbatches == instance.microbatches:
            return None
        instance.microbatches = microbatches
        instance.present_ms = service_ms
        instance.samples += 1
        if instance.samples <= config.warmup:
            instance.baseline_ms = service_ms
            return None
        others = self._others(sid)
        relative = instance.ratio / max(others, 1.0)  # others that became faster make nobody slow
        strike = relative < config.over if instance.slow else relative >= config.factor
        instance.strikes = instance.strikes + 1 if strike else 0
        if not instance.slow and relative < config.over:
            rate = 0.2 if instance.samples <= config.settles else config.creep
            instance.baseline_ms += rate * (service_ms - instance.baseline_ms)
        if instance.strikes < config.confirm:
            return None
        instance.slow, instance.strikes = not instance.slow, 0
        return SlowVerdict(
            sid=sid,
            incarnation=incarnation,
            slow=instance.slow,
            usual_ms=instance.baseline_ms,
            evidence=self._evidence(sid, instance, others),
        )

    def resume(self, sid: str, incarnation: str, usual_ms: float) -> None:
        """Take over that this instance was judged slow by an earlier process."""
        self._instances[sid] = _InstanceHistory(
            incarnation, baseline_ms=usual_ms, samples=self._config.settles, slow=True
        )

    def forget(self, sid: str) -> None:
        self._instances.pop(sid, None)

    def _others(self, sid: str) -> float:
        """Median ratio of service time to baseline over the job's other instances; 1 if there are none."""
        ratios = [
            instance.ratio
            for other, instance in self._instances.items()
            if other != sid and instance.samples > self._config.warmup and not instance.slow
        ]
        return max(median(ratios), 0.1) if ratios else 1.0

    def _evidence(self, sid: str, instance: _InstanceHistory, others: float) -> str:
        figures = (
            f"{instance.present_ms:.1f} ms per microbatch, "
            f"{instance.ratio:.1f}× its usual {instance.baseline_ms:.1f} ms"
        )
        beside = f"the job's others stand at {others:.1f}× theirs; {self._config.confirm} samples in a row"
        return f"{sid} {'has become slow' if instance.slow else 'is well again'}: {figures}; {beside}"
