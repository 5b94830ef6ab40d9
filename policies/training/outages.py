"""Trains `transience`: how long outages last, from pauses between instances' samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from policies.built_in.transience import KIND, Transience, TransienceConfig
from policies.numerics.drift import ErrorDrift
from policies.numerics.outages import REMEMBERED, OutageHistory
from policies.training.trainer import Run, Trainer
from schemas.telemetry import InstanceSample


class OutageTrainer(Trainer[float]):
    """Examples are lengths of outages, s; the loss is what waiting for them costs ÷ what it has to."""

    policy = Transience
    what: ClassVar[str] = "outages"
    least: ClassVar[int] = 20
    unit: ClassVar[str] = "cost ÷ least cost"

    def __init__(self, config: TransienceConfig | None = None) -> None:
        self._config = config or TransienceConfig()

    def examples(self, run: Run) -> list[float]:
        last: dict[tuple[str, str], tuple[str, float]] = {}
        found = []
        for event in run.events:
            sample = event.message
            if not isinstance(sample, InstanceSample):
                continue
            key = (sample.job, sample.sid)
            incarnation, at = last.get(key, (sample.incarnation, event.at))
            if incarnation == sample.incarnation and event.at - at > self._config.silent_s:
                found.append(event.at - at)
            last[key] = sample.incarnation, event.at
        return found

    def learn(self, examples: Sequence[float], now: Any, rng: np.random.Generator) -> Any:
        if not all(math.isfinite(seconds) for seconds in examples):
            raise ValueError("an outage without an end")
        history = OutageHistory(self._config.price_s)
        for seconds in examples[-REMEMBERED:]:
            history.ended(KIND, seconds)
        outages = {**now["outages"], **history.as_data()}
        return {**now, "outages": outages, "errors": ErrorDrift.of(examples).as_data()}

    def loss(self, state: Any, examples: Sequence[float]) -> float:
        history = OutageHistory(self._config.price_s)
        history.restore(state["outages"])
        price_s = self._config.price_s
        wait_s = max(self._config.silent_s, history.patience_s(KIND))
        cost = [seconds if seconds <= wait_s else wait_s + price_s for seconds in examples]
        return sum(cost) / sum(min(seconds, price_s) for seconds in examples)
