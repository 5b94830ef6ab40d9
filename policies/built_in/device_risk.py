"""How likely a device fails soon, by what it and its node reported so far: errors, heat, throttling.

Faults cluster: a device that had one is likelier to have the next, less so as time passes (B. Schroeder, E.
Pinheiro, W.-D. Weber: DRAM errors in the wild, SIGMETRICS 2009; D. Tiwari et al.: Understanding GPU errors on
large-scale HPC systems, HPCA 2015). So the risk is a logistic model over counts of signs that fade, and the
time since the last one, `history`. Its weights were learnt from a log of faults (`make bench-policies`,
section `health`, prints them, and what they are worth: little), and are the same for signs in live telemetry.
What a device says outright needs no model: `alarm`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import ClassVar

import numpy as np

from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.numerics.features import Floats
from schemas.job import ENDED, JobEvent
from schemas.policy import PolicySuggestion
from schemas.telemetry import APPLICATION_XIDS, DeviceSample, InstanceSample

DAY_S = 86400.0
HALF_LIVES_DAYS = (7.0, 30.0)
WEIGHTS = (1.232, -0.311, -0.547)
BIAS = -1.537
"""Of `history`, as learnt from the first part of the log."""
WITHIN_DAYS = 7.0
WARM_C, HOT_C = 85.0, 95.0
"""As in `entities/orchestrator/monitoring/hardware_risk.py`: no longer well; about to throttle or to shut
itself off."""
NEARLY_C = 5.0
"""Below `WARM_C` where a device is worth a look."""
THROTTLED = 0.7
"""Part of its usual power at full utilisation below which a warm device is throttled."""
KEPT = 64


def history(times_days: Sequence[float], now_day: float) -> Floats:
    """Logarithms of 1 + the counts that fade, one per half-life, and of 1 + the days since the last sign."""
    age = np.maximum(now_day - np.array(times_days, dtype=float), 0.0)
    faded = [float(np.exp2(-age / half).sum()) for half in HALF_LIVES_DAYS]
    logarithms: Floats = np.log1p(np.array([*faded, float(age.min())]))
    return logarithms


def risk(times_days: Sequence[float], now_day: float) -> float:
    """The probability of a fault within `WITHIN_DAYS`, by the signs so far, one or more."""
    score = BIAS + float(np.dot(WEIGHTS, history(times_days, now_day)))
    return 1 / (1 + exp(-score))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReading:
    """One sample of a device, with when."""

    at: float
    sample: DeviceSample


def signs(readings: Sequence[DeviceReading]) -> list[tuple[float, str]]:
    """Signs of trouble in a device's readings, each with when (seconds), oldest first.

    What it counts since the driver was loaded before the first reading is one sign, at that time.
    """
    found: list[tuple[float, str]] = []
    ecc, xids, hot = 0, 0, False
    for reading in readings:
        sample = reading.sample
        if sample.ecc_errors is not None and sample.ecc_errors > ecc:
            found.append((reading.at, f"{sample.ecc_errors - ecc} uncorrected memory errors"))
        ecc = max(ecc, sample.ecc_errors or 0)
        codes = [code for code in sample.xid_errors or () if code not in APPLICATION_XIDS]
        if len(codes) > xids:
            found.append((reading.at, f"XID {', '.join(map(str, codes[xids:]))}"))
        xids = max(xids, len(codes))
        warm = sample.temperature_c is not None and sample.temperature_c >= WARM_C
        if warm and not hot:
            found.append((reading.at, f"{sample.temperature_c:.0f} °C"))
        hot = warm
    if throttled := _throttled(readings):
        found.append((readings[-1].at, throttled))
    return found


def _throttled(readings: Sequence[DeviceReading]) -> str:
    """Whether the device draws much less than it did at the same load, while it is warm."""
    powers = [
        reading.sample.power_w
        for reading in readings
        if reading.sample.power_w is not None and (reading.sample.utilization or 0.0) >= 0.9
    ]
    last = readings[-1].sample if readings else None
    if last is None or len(powers) < 8 or last.power_w != powers[-1]:
        return ""
    usual = float(np.median(powers[:-1]))
    warm = last.temperature_c is not None and last.temperature_c >= WARM_C - NEARLY_C
    if warm and powers[-1] < THROTTLED * usual:
        return f"{powers[-1]:.0f} W at full load, usually {usual:.0f} W: throttled"
    return ""


def alarm(readings: Sequence[DeviceReading], now: float, *, recent_s: float = 300.0) -> str:
    """What a device says outright in the last minutes; empty if nothing. Heat includes where it is going."""
    if not readings:
        return ""
    latest = [text for at, text in signs(readings) if now - at <= recent_s and not text.endswith("°C")]
    temperature = readings[-1].sample.temperature_c
    if temperature is not None and temperature >= HOT_C:
        latest.append(f"{temperature:.0f} °C")
    elif (rise := _rise_c_per_s(readings)) is not None and temperature is not None:
        soon = temperature + 60.0 * rise
        if temperature >= WARM_C and soon >= HOT_C:
            latest.append(f"{temperature:.0f} °C, {soon:.0f} °C in a minute")
    return ", ".join(latest)


def _rise_c_per_s(readings: Sequence[DeviceReading]) -> float | None:
    """Slope of the temperature over the last minute; None for fewer than four readings."""
    points = [
        (reading.at, reading.sample.temperature_c)
        for reading in readings
        if reading.sample.temperature_c is not None and readings[-1].at - reading.at <= 60.0
    ]
    if len(points) < 4:
        return None
    at, temperature = (np.array(side, dtype=float) for side in zip(*points, strict=True))
    spread = at - at.mean()
    return float((spread * temperature).sum() / max(float((spread**2).sum()), 1e-9))


def _doubtful(sample: DeviceSample) -> bool:
    """Whether there may be a sign in it; of all other devices nothing has to be worked out."""
    warm = sample.temperature_c is not None and sample.temperature_c >= WARM_C - NEARLY_C
    return warm or bool(sample.ecc_errors) or bool(sample.xid_errors)


class DeviceRisk(Policy):
    """Avoids an instance whose device says it is broken, where its stage has others; notes mere risks."""

    name: ClassVar[str] = "device-risk"
    version: ClassVar[str] = "1"
    every_s: ClassVar[float] = 5.0
    valid_s: ClassVar[float] = 120.0

    def __init__(self) -> None:
        self._readings: dict[str, dict[str, tuple[str, deque[DeviceReading]]]] = {}
        self._doubtful: dict[str, set[str]] = {}

    def on_instance_sample(self, sample: InstanceSample, at: float) -> None:
        if sample.device is None:
            return
        known = self._readings.setdefault(sample.job, {})
        if sample.sid not in known or known[sample.sid][0] != sample.incarnation:  # perhaps another device
            known[sample.sid] = sample.incarnation, deque(maxlen=KEPT)
            self._doubtful.setdefault(sample.job, set()).discard(sample.sid)
        if _doubtful(sample.device):
            self._doubtful[sample.job].add(sample.sid)
        known[sample.sid][1].append(DeviceReading(at=at, sample=sample.device))

    def on_job_event(self, event: JobEvent, at: float) -> None:
        if event.state in ENDED:
            self._readings.pop(event.job, None)
            self._doubtful.pop(event.job, None)

    def decide(self, view: JobView, now: float) -> Suggestions:
        said: list[PolicySuggestion] = []
        doubtful: list[tuple[float, str]] = []
        known = {
            sid: list(readings)
            for sid, (_, readings) in sorted(self._readings.get(view.job, {}).items())
            if sid in self._doubtful[view.job] and sid in view.instances and view.instances[sid].usable
        }
        alarms = {sid: text for sid, readings in known.items() if (text := alarm(readings, now))}
        for sid, readings in known.items():
            found = signs(readings)
            device = readings[-1].sample.device
            if sid in alarms:
                stage = view.stage(view.instances[sid].stage, now)
                others = any(one.sid not in alarms for one in stage)
                if others and self._due(view, f"instance {sid}", now):
                    reason = f"device {device} of {sid}: {alarms[sid]}"
                    said.append(self.avoid(view, sid, reason=reason, confidence=0.85, valid_s=self.valid_s))
            elif found:
                last = found[-1][1]
                chance = risk([at / DAY_S for at, _ in found], now / DAY_S)
                doubtful.append(
                    (chance, f"device {device} of {sid}: {last}; fails within a week with {chance:.0%}")
                )
        if doubtful and self._due(view, "note", now):
            chance, told = max(doubtful)
            said.append(self.note(view, told, confidence=round(chance, 3), valid_s=self.valid_s))
        return said or None

    def _due(self, view: JobView, topic: str, now: float) -> bool:
        own = view.own.get(topic)
        return own is None or now - own.at >= self.valid_s / 2
