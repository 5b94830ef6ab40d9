"""The probability that a device fails soon, from its reports so far: errors, heat, throttling.

Faults cluster: a device that had one is likelier to have the next, less so as time passes (B. Schroeder, E.
Pinheiro, W.-D. Weber: DRAM errors in the wild, SIGMETRICS 2009; D. Tiwari et al.: Understanding GPU errors on
large-scale HPC systems, HPCA 2015). So the risk is a logistic model over fading counts of signs and the time
since the last one, `history`. Its weights were learnt from a log of faults (`make bench-policies`, section
`health`, prints them and their benefit, which is small), and are the same for signs in live telemetry.
Explicit alarms of a device need no model: `alarm`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, ClassVar

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.numerics.features import Floats
from schemas.job import ENDED, JobEvent
from schemas.policy import PolicySuggestion
from schemas.telemetry import APPLICATION_XIDS, DeviceSample, InstanceSample

SECONDS_PER_DAY = 86_400.0
HALF_LIVES_DAYS = (7.0, 30.0)
WEIGHTS = (1.232, -0.311, -0.547)
BIAS = -1.537
"""Weights and bias for `history`, learnt from the first part of the log."""
WITHIN_DAYS = 7.0
WARM_C, HOT_C = 85.0, 95.0
"""As in `entities/orchestrator/monitoring/hardware_risk.py`: too warm; about to throttle or to shut itself
off."""
NEARLY_C = 5.0
"""Degrees below `WARM_C` from which a device is evaluated."""
THROTTLED = 0.7
"""Share of its usual power at full utilisation below which a warm device counts as throttled."""
MOST_READINGS = 64
MOST_SUSPECTS = 16
"""Most suspicious devices whose readings are kept on the bus."""
MOST_SILENT_S = 3600.0
"""Seconds that a device's last reading may lie behind the newest of all for that."""


def history(times_days: Sequence[float], now_day: float) -> Floats:
    """Logarithms of 1 + the fading counts, one per half-life, and of 1 + the days since the last sign."""
    age = np.maximum(now_day - np.array(times_days, dtype=float), 0.0)
    faded = [float(np.exp2(-age / half).sum()) for half in HALF_LIVES_DAYS]
    logarithms: Floats = np.log1p(np.array([*faded, float(age.min())]))
    return logarithms


class RiskModel(TypedDict):
    """The logistic model over `history`: three weights and the bias."""

    weights: tuple[float, float, float]
    bias: float


LEARNT = RiskModel(weights=WEIGHTS, bias=BIAS)
"""As learnt from the log."""


def risk(times_days: Sequence[float], now_day: float, model: RiskModel = LEARNT) -> float:
    """The probability of a fault within `WITHIN_DAYS`, from the signs so far, at least one."""
    score = model["bias"] + float(np.dot(model["weights"], history(times_days, now_day)))
    return 1 / (1 + exp(-min(max(score, -40.0), 40.0)))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReading:
    """One sample of a device with its time in seconds."""

    at: float
    sample: DeviceSample


def _reading(packed: tuple[float, dict[str, Any]]) -> DeviceReading:
    return DeviceReading(at=packed[0], sample=DeviceSample.model_validate(packed[1]))


def signs(readings: Sequence[DeviceReading]) -> list[tuple[float, str]]:
    """Signs of a failing device in its readings, each with its time (seconds), oldest first.

    All errors that the driver counted before the first reading are one sign, at that reading's time.
    """
    result: list[tuple[float, str]] = []
    ecc, xids, hot = 0, 0, False
    for reading in readings:
        sample = reading.sample
        if sample.ecc_errors is not None and sample.ecc_errors > ecc:
            result.append((reading.at, f"{sample.ecc_errors - ecc} uncorrected memory errors"))
        ecc = max(ecc, sample.ecc_errors or 0)
        codes = [code for code in sample.xid_errors or () if code not in APPLICATION_XIDS]
        if len(codes) > xids:
            result.append((reading.at, f"XID {', '.join(map(str, codes[xids:]))}"))
        xids = max(xids, len(codes))
        warm = sample.temperature_c is not None and sample.temperature_c >= WARM_C
        if warm and not hot:
            result.append((reading.at, f"{sample.temperature_c:.0f} °C"))
        hot = warm
    if throttling := _throttling(readings):
        result.append((readings[-1].at, throttling))
    return result


def _throttling(readings: Sequence[DeviceReading]) -> str:
    """Throttling, in words: a warm device draws much less power than before at the same load; else empty."""
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
    """Explicit alarms of a device in the last minutes; empty if none. Heat includes the expected heat."""
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


def _is_suspicious(sample: DeviceSample) -> bool:
    """Whether the sample may hold a sign; devices without such samples are not evaluated."""
    warm = sample.temperature_c is not None and sample.temperature_c >= WARM_C - NEARLY_C
    return warm or bool(sample.ecc_errors) or bool(sample.xid_errors)


class SuspectState(TypedDict):
    """The readings of one suspicious device: seconds, and the sample's fields."""

    job: str
    sid: str
    incarnation: str
    readings: list[tuple[float, dict[str, Any]]]


class DeviceRiskState(TypedDict):
    """What it learnt, as plain data; `model` None: the one that it comes with."""

    model: RiskModel | None
    suspects: list[SuspectState]


_STATE = TypeAdapter(DeviceRiskState)


class DeviceRisk(Policy):
    """Avoids an instance whose device reports a defect, if its stage has others; notes mere risks."""

    name: ClassVar[str] = "device-risk"
    version: ClassVar[str] = "1"
    every_s: ClassVar[float] = 5.0
    state_version: ClassVar[int] = 1
    valid_s: ClassVar[float] = 120.0

    def __init__(self) -> None:
        self._readings: dict[str, dict[str, tuple[str, deque[DeviceReading]]]] = {}
        self._suspects: dict[str, set[str]] = {}
        self._model: RiskModel | None = None

    def learnt_state(self) -> DeviceRiskState:
        """The model, if it is not the one that it comes with, and what suspicious devices reported so far.

        Not of those that have reported nothing for an hour: their job has ended.
        """
        lasts = {
            (job, sid): readings[-1].at
            for job, devices in self._readings.items()
            for sid, (_, readings) in devices.items()
            if readings
        }
        since = max(lasts.values(), default=0.0) - MOST_SILENT_S
        suspects = [
            (job, sid)
            for job, sids in sorted(self._suspects.items())
            for sid in sorted(sids)
            if (job, sid) in lasts and lasts[job, sid] >= since
        ]
        return DeviceRiskState(
            model=self._model,
            suspects=[
                SuspectState(
                    job=job,
                    sid=sid,
                    incarnation=self._readings[job][sid][0],
                    readings=[
                        (reading.at, reading.sample.model_dump(mode="json", exclude_none=True))
                        for reading in self._readings[job][sid][1]
                    ],
                )
                for job, sid in suspects[:MOST_SUSPECTS]
            ],
        )

    def restore(self, state: Any) -> None:
        known = _STATE.validate_python(state)
        restored = [(suspect, list(map(_reading, suspect["readings"]))) for suspect in known["suspects"]]
        self._model = known["model"]
        for job, sids in self._suspects.items():
            for sid in sids:
                self._readings[job].pop(sid, None)
        self._suspects = {}
        for suspect, readings in restored:
            job, sid = suspect["job"], suspect["sid"]
            self._suspects.setdefault(job, set()).add(sid)
            kept = deque(readings, maxlen=MOST_READINGS)
            self._readings.setdefault(job, {})[sid] = suspect["incarnation"], kept

    def on_instance_sample(self, sample: InstanceSample, at: float) -> None:
        if sample.device is None:
            return
        readings = self._readings.setdefault(sample.job, {})
        if sample.sid not in readings or readings[sample.sid][0] != sample.incarnation:  # maybe a new device
            readings[sample.sid] = sample.incarnation, deque(maxlen=MOST_READINGS)
            self._suspects.setdefault(sample.job, set()).discard(sample.sid)
        if _is_suspicious(sample.device):
            self._suspects.setdefault(sample.job, set()).add(sample.sid)
        readings[sample.sid][1].append(DeviceReading(at=at, sample=sample.device))

    def on_job_event(self, event: JobEvent, at: float) -> None:
        if event.state in ENDED:
            self._readings.pop(event.job, None)
            self._suspects.pop(event.job, None)

    def decide(self, view: JobView, now: float) -> Suggestions:
        suggestions: list[PolicySuggestion] = []
        risks: list[tuple[float, str]] = []
        suspected = self._suspects.get(view.job, set())
        suspects = {
            sid: list(readings)
            for sid, (_, readings) in sorted(self._readings.get(view.job, {}).items())
            if sid in suspected and sid in view.instances and view.instances[sid].usable
        }
        alarms = {sid: text for sid, readings in suspects.items() if (text := alarm(readings, now))}
        for sid, readings in suspects.items():
            device_signs = signs(readings)
            device = readings[-1].sample.device
            if sid in alarms:
                stage = view.stage(view.instances[sid].stage, now)
                others = any(instance.sid not in alarms for instance in stage)
                if others and view.is_due(f"instance {sid}", now, self.valid_s / 2):
                    reason = f"device {device} of {sid}: {alarms[sid]}"
                    suggestions.append(
                        self.avoid(view, sid, reason=reason, confidence=0.85, valid_s=self.valid_s)
                    )
            elif device_signs:
                last, model = device_signs[-1][1], self._model or LEARNT
                chance = risk([at / SECONDS_PER_DAY for at, _ in device_signs], now / SECONDS_PER_DAY, model)
                risks.append(
                    (chance, f"device {device} of {sid}: {last}; fails within a week with {chance:.0%}")
                )
        if risks and view.is_due("note", now, self.valid_s / 2):
            chance, text = max(risks)
            suggestions.append(self.note(view, text, confidence=round(chance, 3), valid_s=self.valid_s))
        return suggestions or None
