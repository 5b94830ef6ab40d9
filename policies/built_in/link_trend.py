"""Says which links will soon be slow, how surely, and keeps work away from instances behind them.

The forecast stands in `policies.numerics.forecasting`; this is what it is made from, and when it may speak.
Routing by expected completion heeds what links take now (ADR-0019); this looks ten seconds ahead. Where the
transfer times of the last minutes are not serially correlated, nothing can be forecast, and it keeps quiet.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import ClassVar

import numpy as np

from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.numerics.features import Floats
from policies.numerics.forecasting import ForecastConfig, Trend, fit
from policies.numerics.link_history import STEP_S, Link, LinkHistory
from policies.numerics.serial_correlation import serial_correlation
from schemas.job import ENDED, JobEvent
from schemas.policy import PolicySuggestion
from schemas.telemetry import InstanceSample

COVERAGE = 0.9
"""Of a forecast's interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTrendConfig:
    """When a link counts as hot, and what follows."""

    ahead_steps: int = 2
    """Of `STEP_S`. Further ahead is less sure."""

    fit_steps: int = 72
    """Of history that a model is fitted to; 72 are six minutes. Fewer speaks sooner, and knows less."""

    refit_steps: int = 12
    """Between two fits."""

    most_links: int = 512
    """Of a job: the slowest when a model is fitted. A forecast of 429 takes a millisecond, a fit a second."""

    hot_times: float = 2.0
    """A link is hot when a transfer takes so many times the median over the job's links, …"""

    hot_ms: float = 10.0
    """… and so many milliseconds more than it. Busy cores alone cost some."""

    sure: float = 0.8
    """Probability from which a link is spoken of."""

    valid_s: float = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkForecast:
    """One link `ahead_steps` from now: expected milliseconds, the interval, the chance of being hot."""

    link: Link
    now_ms: float
    expected_ms: float
    low_ms: float
    high_ms: float
    hot: float


class LinkTrend(Policy):
    """Avoids instances whose links are about to be hot, where their stage has others; notes single links."""

    name: ClassVar[str] = "link-trend"
    version: ClassVar[str] = "1"
    every_s: ClassVar[float] = STEP_S

    def __init__(self, config: LinkTrendConfig | None = None) -> None:
        self.config = config or LinkTrendConfig()
        self.history = LinkHistory(self.config.fit_steps + self.config.refit_steps + 64)
        self._fitted: dict[str, tuple[int, tuple[Link, ...], Trend | None]] = {}

    def on_instance_sample(self, sample: InstanceSample, at: float) -> None:
        self.history.take(sample, at)

    def on_job_event(self, event: JobEvent, at: float) -> None:
        if event.state in ENDED:
            self.history.forget(event.job)
            self._fitted.pop(event.job, None)

    def decide(self, view: JobView, now: float) -> Suggestions:
        found = self.forecast(view.job, now)
        hot = {each.link: each for each in found if each.hot >= self.config.sure}
        if not hot:
            return None
        said: list[PolicySuggestion] = []
        explained: set[Link] = set()
        for stage in view.stages:
            chances: dict[str, list[LinkForecast]] = {}
            for instance in view.stage(stage, now):
                into = [each for each in found if each.link[1] == instance.sid]
                if into:
                    chances[instance.sid] = into
            usual = {sid: median(each.hot for each in into) for sid, into in chances.items()}
            if not usual or min(usual.values()) >= 0.5:
                continue  # nowhere better to go
            for sid, chance in sorted(usual.items()):
                if chance < self.config.sure or not self._due(view, f"instance {sid}", now):
                    continue
                explained.update(each.link for each in chances[sid])
                said.append(
                    self.avoid(
                        view,
                        sid,
                        valid_s=self.config.valid_s,
                        reason=_reason(sid, chances[sid], self.config),
                        confidence=round(min(0.95, chance), 3),
                    )
                )
        rest = [each for link, each in sorted(hot.items()) if link not in explained]
        if rest and not said and self._due(view, "note", now):
            text = "; ".join(_told(each) for each in rest[:4])
            said.append(
                self.note(
                    view, f"links about to be slow: {text}", confidence=round(max(e.hot for e in rest), 3)
                )
            )
        return said or None

    def forecast(self, job: str, now: float) -> list[LinkForecast]:
        """Every link of the job that is known for long enough; empty where nothing can be forecast."""
        slot = int(now // STEP_S)
        model, links = self._model(job, slot - slot % self.config.refit_steps)
        if model is None:
            return []
        names = set(self.history.links(job, slot, self.config.fit_steps, most=1 << 30))
        if not names.issuperset(links):
            return []  # somebody went; the next fit knows
        values = self.history.table(job, links, slot, min(self.config.fit_steps, model.config.reach))
        level = model.level(values)
        limit = max(
            self.config.hot_times * float(np.median(values[-1])),
            float(np.median(values[-1])) + self.config.hot_ms,
        )
        low, high = model.interval(level, COVERAGE)
        hot = model.above(level, np.full(len(links), limit))
        parts: list[Floats] = [values[-1], model.value(level), low, high, hot]
        return [
            LinkForecast(link=link, now_ms=a, expected_ms=b, low_ms=c, high_ms=d, hot=e)
            for link, (a, b, c, d, e) in zip(links, np.stack(parts, axis=1).tolist(), strict=True)
        ]

    def _model(self, job: str, slot: int) -> tuple[Trend | None, tuple[Link, ...]]:
        """The model of the history up to `slot`. Kept until the next one, though it could be made anew."""
        kept = self._fitted.get(job)
        if kept is None or kept[0] != slot:
            names = self.history.links(job, slot, self.config.fit_steps, self.config.most_links)
            values = self.history.table(job, names, slot, self.config.fit_steps)
            config = ForecastConfig(horizon=self.config.ahead_steps)
            ready = bool(names) and serial_correlation(values).forecastable
            kept = self._fitted[job] = (slot, tuple(names), fit(values, config) if ready else None)
        return kept[2], kept[1]

    def _due(self, view: JobView, topic: str, now: float) -> bool:
        """Whether to say it (again): after half the validity."""
        own = view.own.get(topic)
        return own is None or now - own.at >= self.config.valid_s / 2


def _told(each: LinkForecast) -> str:
    return (
        f"{each.link[0]} → {each.link[1]} {each.now_ms:.1f} ms now, {each.expected_ms:.1f} ms "
        f"({each.low_ms:.1f}–{each.high_ms:.1f}) expected, hot with {each.hot:.0%}"
    )


def _reason(sid: str, into: list[LinkForecast], config: LinkTrendConfig) -> str:
    worst = max(into, key=lambda each: each.hot)
    ahead = config.ahead_steps * STEP_S
    return f"links into {sid} in {ahead:.0f} s, the worst of {len(into)}: {_told(worst)}"
