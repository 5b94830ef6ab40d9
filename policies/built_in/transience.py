"""Transient or structural outages: waits for a silent instance; avoids one that stays silent or flaps.

An instance sends a sample about once a second. A pause longer than `silent_s` is an outage: the policy waits
as long as past outages make that worthwhile (`outages`, ski rental with a learnt distribution), then suggests
to send nothing there. An instance that comes back is trusted again; one that keeps falling silent is avoided
until its penalty has faded (hysteresis). Dead instances are not its task: the orchestrator's own detection
fences and replaces them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from policies.kit.policy import Policy, Suggestions
from policies.kit.view import InstanceView, JobView
from policies.numerics.drift import ErrorDrift, ErrorDriftState
from policies.numerics.outages import Flapping, OutageHistory
from schemas.job import ENDED, JobEvent
from schemas.policy import PolicySuggestion
from schemas.task_graph import is_data
from schemas.telemetry import InstanceSample

KIND = "silence"
WORTH_KEEPING = 0.1
"""Penalty from which an instance is remembered over a restart of the module."""
MOST_FLAPPING = 500
"""Most instances that are remembered so, those with the highest penalties; some 100 bytes each."""
MOST_SILENT_S = 3600.0
"""Seconds that an instance's last sample may lie behind the newest of all for that: its job has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransienceConfig:
    """What counts as an outage, and the cost of acting on one."""

    silent_s: float = 3.0
    """A longer pause between samples is an outage; samples come once a second and after each step."""

    price_s: float = 20.0
    """The cost of avoiding an instance, in seconds of waiting for it."""

    half_life_s: float = 120.0
    """Seconds in which the penalty of an outage fades by half."""

    valid_s: float = 15.0
    """Seconds for which a suggestion holds; it is renewed after half of that while its reason lasts."""


@dataclass(slots=True)
class _InstanceRecord:
    incarnation: str
    at: float
    flapping: Flapping = field(default_factory=Flapping)


class TransienceState(TypedDict):
    """What it learnt, as plain data.

    `flapping`: job, SID, incarnation, last sample, penalty, since, avoided.
    """

    outages: dict[str, list[float]]
    errors: ErrorDriftState
    flapping: list[tuple[str, str, str, float, float, float, bool]]


_STATE = TypeAdapter(TransienceState)


class Transience(Policy):
    """Avoids instances that are silent for too long or repeatedly."""

    name: ClassVar[str] = "transience"
    version: ClassVar[str] = "1"
    state_version: ClassVar[int] = 1

    def __init__(self, config: TransienceConfig | None = None) -> None:
        self.config = config or TransienceConfig()
        self.outages = OutageHistory(self.config.price_s)
        self._lengths = ErrorDrift()
        self._records: dict[tuple[str, str], _InstanceRecord] = {}

    def learnt_state(self) -> TransienceState:
        """How long outages lasted, and which instances fell silent again and again."""
        newest = max((record.at for record in self._records.values()), default=0.0)
        flapping = [
            (record.flapping.penalty(record.at), key)
            for key, record in self._records.items()
            if record.at >= newest - MOST_SILENT_S
        ]
        worst = sorted(item for item in flapping if item[0] >= WORTH_KEEPING)[-MOST_FLAPPING:]
        records = {key: self._records[key] for _, key in worst}
        return TransienceState(
            outages=self.outages.as_data(),
            errors=self._lengths.as_data(),
            flapping=[
                (*key, record.incarnation, record.at, *record.flapping.as_data())
                for key, record in sorted(records.items())
            ],
        )

    def restore(self, state: Any) -> None:
        known = _STATE.validate_python(state)
        lengths = ErrorDrift()
        lengths.restore(known["errors"])
        self.outages.restore(known["outages"])
        self._lengths = lengths
        for record in self._records.values():
            record.flapping = Flapping(self.config.half_life_s)
        for job, sid, incarnation, at, penalty, since, shunned in known["flapping"]:
            record = self._records.get((job, sid)) or _InstanceRecord(incarnation, at)
            if record.incarnation == incarnation:
                record.flapping = Flapping(self.config.half_life_s)
                record.flapping.restore(penalty, since, shunned)
                self._records[job, sid] = record

    def drift(self) -> str:
        if not self._lengths.drifted:
            return ""
        return f"outages last longer than they did, usually {self._lengths.usual:.1f} s"

    def on_instance_sample(self, sample: InstanceSample, at: float) -> None:
        record = self._records.get((sample.job, sample.sid))
        if record is None or record.incarnation != sample.incarnation:
            new = _InstanceRecord(sample.incarnation, at, Flapping(self.config.half_life_s))
            self._records[sample.job, sample.sid] = new
            return
        pause_s = at - record.at
        if pause_s > self.config.silent_s:
            self.outages.ended(KIND, pause_s)
            self._lengths.add(pause_s)
            record.flapping.fell(at)
        record.flapping.trusted(at)
        record.at = max(record.at, at)

    def on_job_event(self, event: JobEvent, at: float) -> None:
        if event.state in ENDED:
            for key in [key for key in self._records if key[0] == event.job]:
                del self._records[key]

    def decide(self, view: JobView, now: float) -> Suggestions:
        records = [record for (job, _), record in self._records.items() if job == view.job]
        silent = sum(now - record.at > self.config.silent_s for record in records)
        if 2 * silent > len(records):
            return None  # probably this module receives nothing (Lifeguard; Dadgar et al., 2018)
        patience_s = max(self.config.silent_s, self.outages.patience_s(KIND))
        usable = [instance for instance in view.instances.values() if instance.usable]
        suggestions = [self._instance(view, instance, patience_s, now) for instance in usable]
        return [suggestion for suggestion in suggestions if suggestion is not None]

    def _instance(
        self, view: JobView, instance: InstanceView, patience_s: float, now: float
    ) -> PolicySuggestion | None:
        record = self._records.get((view.job, instance.sid))
        if record is None or record.incarnation != instance.incarnation or is_data(instance.stage):
            return None
        silent_s = now - record.at
        if silent_s > patience_s:
            lasting = self.outages.lasting(KIND, silent_s)
            reason = (
                f"silent for {silent_s:.1f} s, {patience_s:.1f} s are worth waiting; "
                f"it lasts {self.config.price_s:g} s with {lasting:.0%} by past outages"
            )
        elif record.flapping.shunned(now):
            lasting = min(0.95, record.flapping.penalty(now) / (record.flapping.high + 1))
            reason = (
                f"flaps: penalty {record.flapping.penalty(now):.1f}, "
                f"trusted again below {record.flapping.low:g}, in {record.flapping.back_s(now):.0f} s"
            )
        else:
            return None
        if not view.is_due(f"instance {instance.sid}", now, self.config.valid_s / 2):
            return None
        confidence = round(min(0.95, max(0.5, lasting)), 3)
        return self.avoid(
            view, instance.sid, reason=reason, confidence=confidence, valid_s=self.config.valid_s
        )
