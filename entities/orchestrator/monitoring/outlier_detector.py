"""Whether a figure is far above its recent values: modified z-score, hysteresis, cool-down. Pure.

z = 0.6745 · (x − median) ÷ MAD over the last values (Iglewicz and Hoaglin, *How to Detect and Handle
Outliers*, 1993). Median and median absolute deviation (MAD) tolerate outliers in up to half of the window;
mean and standard deviation tolerate none. The authors call |z| > 3.5 an outlier of one sample. A run is
tested thousands of times, and its noise has longer tails than a normal distribution, so an alarm here needs a
higher z.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

SCALE = 0.6745
"""Third quartile of the standard normal: makes MAD ÷ SCALE a standard deviation where noise is normal."""


@dataclass(frozen=True, kw_only=True)
class OutlierConfig:
    """When a figure counts as abnormal."""

    window: int = 50  # recent values with which a value is compared
    warmup: int = 20  # values before the first judgement: the first steps of a run are unlike later ones
    raise_z: float = 10.0  # see the module: in 20 seeds × 2,000 quiet steps the highest z was below this
    clear_z: float = 4.0  # at or below this the alarm is over; the gap to raise_z is the hysteresis
    floor: float = 0.02  # least deviation, as a part of the median: noise of a flat series raises no alarm
    least: float = 1e-12  # least deviation in the figure's own unit
    confirm: int = 1  # abnormal values in a row that raise the alarm
    cooldown: int = 20  # values after the end of one alarm before the next
    settles: int = 50  # values after which an abnormal level becomes the new normal

    def __post_init__(self) -> None:
        if not 0 < self.clear_z < self.raise_z:
            raise ValueError(f"clear_z {self.clear_z} must be above 0 and below raise_z {self.raise_z}")
        if not 3 <= self.warmup <= self.window:
            raise ValueError(f"warmup {self.warmup} must be from 3 to window {self.window}")


@dataclass(frozen=True, slots=True)
class OutlierChange:
    """The alarm began (`raised`) or is over. `z` is infinite if the value was not finite."""

    raised: bool
    usual: float
    z: float


class OutlierDetector:
    """Detects outliers of one series, upwards only: a falling loss is no alarm."""

    def __init__(self, config: OutlierConfig = OutlierConfig()) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=config.window)
        self.raised = False
        self._strikes = 0
        self._since = config.cooldown  # values since the last alarm ended, or since this one began

    def observe(self, value: float) -> OutlierChange | None:
        """Takes the next value; returns a change of the alarm. Abnormal values don't enter the window."""
        config = self._config
        if len(self._recent) < config.warmup:
            if math.isfinite(value):
                self._recent.append(value)
            return None
        usual = median(self._recent)
        z = self._score(value, usual)
        self._since += 1
        if self.raised:
            if z <= config.clear_z:
                self._recent.append(value)
                return self._ends(usual, z)
            if self._since >= config.settles:  # the new level lasts
                self._recent.clear()
                return self._ends(usual, z)
            return None
        self._strikes = self._strikes + 1 if z >= config.raise_z else 0
        if self._strikes and self._strikes >= config.confirm and self._since > config.cooldown:
            self.raised, self._since = True, 0
            return OutlierChange(True, usual, z)
        if z < config.raise_z:
            self._recent.append(value)
        return None

    def resume(self, usual: float) -> None:
        """Starts with a raised alarm, of which only the usual value before it is known."""
        self._recent.extend([usual] * self._config.warmup)
        self.raised, self._since = True, 0

    def _ends(self, usual: float, z: float) -> OutlierChange:
        self.raised, self._strikes, self._since = False, 0, 0
        return OutlierChange(False, usual, z)

    def _score(self, value: float, usual: float) -> float:
        if not math.isfinite(value):
            return math.inf
        deviation = median(abs(other - usual) for other in self._recent)
        deviation = max(deviation, self._config.floor * abs(usual), self._config.least)
        return SCALE * (value - usual) / deviation
