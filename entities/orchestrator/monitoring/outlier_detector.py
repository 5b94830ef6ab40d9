"""Whether a figure is far above what it was lately: modified z-score, hysteresis, cool-down. Pure.

z = 0.6745 · (x − median) ÷ MAD over the last values (Iglewicz and Hoaglin, *How to Detect and Handle
Outliers*, 1993): median and median absolute deviation bear that up to half of the window is absurd, mean and
deviation not one. They call |z| > 3.5 an outlier of one sample; a run asks thousands of times, and its noise
has longer tails than a normal one's, so that an alarm here needs more.
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
    """When a figure is called abnormal."""

    window: int = 50  # values that it is compared with
    warmup: int = 20  # values before the first judgement: the first steps of a run are like no others
    raise_z: float = 10.0  # see the module: in 20 seeds × 2,000 quiet steps the highest was below this
    clear_z: float = 4.0  # back below this it is over; the gap is the hysteresis
    floor: float = 0.02  # least deviation, as a part of the median: a flat series makes no alarm of nothing
    least: float = 1e-12  # least deviation in the figure's own unit
    confirm: int = 1  # values in a row to raise it
    cooldown: int = 20  # values after the end of one alarm before the next
    settles: int = 50  # values after which what is abnormal is the new normal

    def __post_init__(self) -> None:
        if not 0 < self.clear_z < self.raise_z:
            raise ValueError(f"clear_z {self.clear_z} must be above 0 and below raise_z {self.raise_z}")
        if not 3 <= self.warmup <= self.window:
            raise ValueError(f"warmup {self.warmup} must be from 3 to window {self.window}")


@dataclass(frozen=True, slots=True)
class OutlierChange:
    """The alarm began (`raised`) or is over. `z` is infinite where the value was no finite number."""

    raised: bool
    usual: float
    z: float


class OutlierDetector:
    """One series. Only upwards: a loss that falls is no alarm."""

    def __init__(self, config: OutlierConfig = OutlierConfig()) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=config.window)
        self.raised = False
        self._strikes = 0
        self._since = config.cooldown  # values since the last alarm ended, or since this one began

    def observe(self, value: float) -> OutlierChange | None:
        """The next value; news, if it is any. What is abnormal does not count as usual while it lasts."""
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
            if self._since >= config.settles:  # it stays like that
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
        """An alarm stands, and of what was before only this is known."""
        self._recent.extend([usual] * self._config.warmup)
        self.raised, self._since = True, 0

    def _ends(self, usual: float, z: float) -> OutlierChange:
        self.raised, self._strikes, self._since = False, 0, 0
        return OutlierChange(False, usual, z)

    def _score(self, value: float, usual: float) -> float:
        if not math.isfinite(value):
            return math.inf
        deviation = median(abs(each - usual) for each in self._recent)
        deviation = max(deviation, self._config.floor * abs(usual), self._config.least)
        return SCALE * (value - usual) / deviation
