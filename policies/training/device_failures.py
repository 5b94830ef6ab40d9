"""Trains the model of `device-risk`: which signs of a device are followed by a fault of its instance."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from policies.built_in.device_risk import (
    LEARNT,
    MOST_READINGS,
    SECONDS_PER_DAY,
    WITHIN_DAYS,
    DeviceReading,
    DeviceRisk,
    history,
    risk,
    signs,
)
from policies.contrib.logistic import fit_logistic
from policies.training.trainer import Run, Trainer
from schemas.fault import FaultVerdict
from schemas.telemetry import InstanceSample

LEAST_FAULTS = 4
"""Signs with, and signs without, a fault after them."""


class DeviceSign(NamedTuple):
    """The signs of a device until one moment, in days, and whether a fault of its instance followed.

    It followed within `WITHIN_DAYS` and within the record: what came after a record is not known.
    """

    times_days: tuple[float, ...]
    now_day: float
    failed: bool


class DeviceFailureTrainer(Trainer[DeviceSign]):
    """Examples are signs of devices; the loss is the mean squared error of the probability (Brier)."""

    policy = DeviceRisk
    what: ClassVar[str] = "signs of devices"
    least: ClassVar[int] = 30
    unit: ClassVar[str] = "Brier score"

    def examples(self, run: Run) -> list[DeviceSign]:
        readings: dict[tuple[str, str], deque[DeviceReading]] = {}
        faults: dict[str, list[float]] = {}
        moments: list[tuple[str, tuple[float, ...], float]] = []
        seen: dict[tuple[str, str], int] = {}
        for event in run.events:
            message = event.message
            if isinstance(message, FaultVerdict) and message.verdict != "unfounded":
                faults.setdefault(message.sid, []).append(event.at / SECONDS_PER_DAY)
            if not isinstance(message, InstanceSample) or message.device is None:
                continue
            key = (message.sid, message.incarnation)
            own = readings.setdefault(key, deque(maxlen=MOST_READINGS))
            own.append(DeviceReading(at=event.at, sample=message.device))
            found = signs(list(own))
            if len(found) > seen.get(key, 0):
                moments.append(
                    (
                        message.sid,
                        tuple(at / SECONDS_PER_DAY for at, _ in found),
                        event.at / SECONDS_PER_DAY,
                    )
                )
            seen[key] = len(found)
        return [
            DeviceSign(times, day, any(0 < at - day <= WITHIN_DAYS for at in faults.get(sid, ())))
            for sid, times, day in moments
        ]

    def learn(self, examples: Sequence[DeviceSign], now: Any, rng: np.random.Generator) -> Any:
        truth = np.array([one.failed for one in examples])
        if min(truth.sum(), (~truth).sum()) < LEAST_FAULTS:
            raise ValueError(
                f"{truth.sum()} of {len(truth)} signs were followed by a fault; it takes {LEAST_FAULTS} of "
                "each kind"
            )
        table = np.stack([history(one.times_days, one.now_day) for one in examples])
        if not np.isfinite(table).all():
            raise ValueError("a sign whose time is not finite")
        model = fit_logistic(table, truth)
        weights = model.weights[:-1] / model.deviation
        bias = float(model.weights[-1] - (model.weights[:-1] * model.mean / model.deviation).sum())
        return {**now, "model": {"weights": [float(weight) for weight in weights], "bias": bias}}

    def loss(self, state: Any, examples: Sequence[DeviceSign]) -> float:
        model = state["model"] or LEARNT
        errors = [(risk(one.times_days, one.now_day, model) - one.failed) ** 2 for one in examples]
        return float(np.mean(errors))
