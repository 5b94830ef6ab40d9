"""Transient or structural: a silent instance is waited for; one that stays so, or flaps, is avoided.

An instance samples about once a second. A pause longer than `silent_s` is an outage: the module waits as
long as past outages make it worth (`outages`, ski rental with a learnt distribution), then suggests that
nothing be sent there. What comes back after that is trusted again; what keeps falling silent is avoided
until its penalty has faded (hysteresis). Death is not its matter: the orchestrator's own detection fences
and replaces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from policies.kit.policy import Policy, Suggestions
from policies.kit.view import InstanceView, JobView
from policies.numerics.outages import Flapping, OutageHistory
from schemas.job import ENDED, JobEvent
from schemas.policy import PolicySuggestion
from schemas.telemetry import InstanceSample

KIND = "silence"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransienceConfig:
    """What counts as an outage, and what it costs to act on one."""

    silent_s: float = 3.0
    """A pause between samples that is an outage; they come once a second and after each step."""

    price_s: float = 20.0
    """What doing without an instance costs, in seconds of waiting for it."""

    half_life_s: float = 120.0
    """In which the penalty of an outage fades by half."""

    valid_s: float = 15.0
    """Seconds a suggestion holds; renewed at half of that while it is called for."""


@dataclass(slots=True)
class _KnownInstance:
    incarnation: str
    at: float
    flapping: Flapping = field(default_factory=Flapping)


class Transience(Policy):
    """Avoids what is silent for too long, or again and again."""

    name: ClassVar[str] = "transience"
    version: ClassVar[str] = "1"

    def __init__(self, config: TransienceConfig | None = None) -> None:
        self.config = config or TransienceConfig()
        self.outages = OutageHistory(self.config.price_s)
        self._known: dict[tuple[str, str], _KnownInstance] = {}

    def on_instance_sample(self, sample: InstanceSample, at: float) -> None:
        known = self._known.get((sample.job, sample.sid))
        if known is None or known.incarnation != sample.incarnation:
            fresh = _KnownInstance(sample.incarnation, at, Flapping(self.config.half_life_s))
            self._known[sample.job, sample.sid] = fresh
            return
        pause_s = at - known.at
        if pause_s > self.config.silent_s:
            self.outages.ended(KIND, pause_s)
            known.flapping.fell(at)
        known.flapping.trusted(at)
        known.at = max(known.at, at)

    def on_job_event(self, event: JobEvent, at: float) -> None:
        if event.state in ENDED:
            for key in [one for one in self._known if one[0] == event.job]:
                del self._known[key]

    def decide(self, view: JobView, now: float) -> Suggestions:
        known = [one for (job, _), one in self._known.items() if job == view.job]
        silent = sum(now - one.at > self.config.silent_s for one in known)
        if 2 * silent > len(known):
            return None  # it is rather this module that hears nothing (Lifeguard; Dadgar et al., 2018)
        patience_s = max(self.config.silent_s, self.outages.patience_s(KIND))
        found = [self._instance(view, one, patience_s, now) for one in view.instances.values() if one.usable]
        return [suggestion for suggestion in found if suggestion is not None]

    def _instance(
        self, view: JobView, instance: InstanceView, patience_s: float, now: float
    ) -> PolicySuggestion | None:
        known = self._known.get((view.job, instance.sid))
        if known is None or known.incarnation != instance.incarnation or instance.stage < 0:
            return None
        silent_s = now - known.at
        if silent_s > patience_s:
            lasting = self.outages.lasting(KIND, silent_s)
            reason = (
                f"silent for {silent_s:.1f} s, {patience_s:.1f} s are worth waiting; "
                f"it lasts {self.config.price_s:g} s with {lasting:.0%} by past outages"
            )
        elif known.flapping.shunned(now):
            lasting = min(0.95, known.flapping.penalty(now) / (known.flapping.high + 1))
            reason = (
                f"flaps: penalty {known.flapping.penalty(now):.1f}, "
                f"trusted again below {known.flapping.low:g}, in {known.flapping.back_s(now):.0f} s"
            )
        else:
            return None
        own = view.own.get(f"instance {instance.sid}")
        if own is not None and now - own.at < self.config.valid_s / 2:
            return None
        confidence = round(min(0.95, max(0.5, lasting)), 3)
        return self.avoid(
            view, instance.sid, reason=reason, confidence=confidence, valid_s=self.config.valid_s
        )
