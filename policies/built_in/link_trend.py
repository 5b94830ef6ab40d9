"""Forecasts which links will soon be slow, with a probability, and avoids instances behind them.

`policies.numerics.forecasting` makes the forecast; this policy provides its input and decides when it may
speak. Routing by expected completion uses present transfer times (ADR-0019); this policy looks ten seconds
ahead, and avoids an instance where its stage will be faster without it (`avoidance`). If the transfer
times of the last minutes are not serially correlated, nothing can be forecast, and it is silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import numpy as np
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from bus.subject_row import Subject
from bus.subjects import COMPUTE
from policies.built_in.avoidance import avoiding_pays
from policies.kit.policy import Policy, Suggestions
from policies.kit.view import JobView
from policies.numerics.drift import ErrorDrift, ErrorDriftState
from policies.numerics.features import Floats
from policies.numerics.forecasting import ForecastConfig, Trend, fit
from policies.numerics.link_history import MOST_SILENT_STEPS, Link, LinkHistory, LinksOfJob
from policies.numerics.serial_correlation import serial_correlation
from schemas.job import ENDED, JobEvent
from schemas.learnt_state import MOST_LEARNT_BYTES, canonical_json
from schemas.policy import PolicySuggestion
from schemas.telemetry import InstanceSample

NARROWEST = 0.01
"""Milliseconds: a narrower interval counts as this wide. Errors below that are those of clocks."""


class ExpectedLinks(TypedDict):
    """One forecast of all links of a job, until what comes in its slot is known; milliseconds."""

    slot: int
    links: list[Link]
    value: list[float]
    spread: list[float]


class LinkTrendState(TypedDict):
    """What it learnt, as plain data; by job but for `errors`."""

    links: dict[str, LinksOfJob]
    errors: ErrorDriftState
    expected: dict[str, ExpectedLinks]
    slots: dict[str, int]


_STATE = TypeAdapter(LinkTrendState)
MOST_FIGURES = 12_000
"""Most figures that are kept on the bus, some 210 KiB: of 81 links with 12 minutes each."""
COVERAGE = 0.9
"""Coverage of a forecast's interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTrendConfig:
    """When a link counts as hot, and what is suggested then."""

    ahead_steps: int = 2
    """Steps of `LinkHistory.step_s` to forecast. Further ahead is less sure."""

    fit_steps: int = 72
    """Steps of history for a fit; 72 are six minutes. Fewer allows an earlier, less informed forecast."""

    refit_steps: int = 12
    """Steps between two fits."""

    most_links: int = 512
    """Most links of a job; the slowest are taken. A forecast of 429 takes a millisecond, a fit a second."""

    hot_times: float = 2.0
    """A link is hot if a transfer takes this many times the median over the job's links and `hot_ms` more."""

    hot_ms: float = 10.0
    """Milliseconds beyond the median from which a link is hot. Busy cores alone cost some milliseconds."""

    report_from: float = 0.8
    """Probability from which a link is reported."""

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
    every_s: ClassVar[float] = LinkHistory.step_s
    state_version: ClassVar[int] = 1

    def __init__(self, config: LinkTrendConfig | None = None) -> None:
        self.config = config or LinkTrendConfig()
        self.history = LinkHistory(self.config.fit_steps + self.config.refit_steps + 64)
        self._models: dict[str, tuple[int, tuple[Link, ...], Trend | None]] = {}
        self._errors = ErrorDrift()
        self._slots: dict[str, int] = {}
        self._expected: dict[str, ExpectedLinks] = {}

    def learnt_state(self) -> LinkTrendState:
        """The figures of the last minutes, more than the streams bring back, and errors of forecasts.

        Of more links than fit, those of the slowest.
        """
        for most in (MOST_FIGURES, MOST_FIGURES // 2, MOST_FIGURES // 4):
            state = self._state(most)
            if len(canonical_json(state).encode()) <= MOST_LEARNT_BYTES:
                return state
        return self._state(0)

    def _state(self, most: int) -> LinkTrendState:
        newest = max(self._slots.values(), default=0)
        slots = {job: slot for job, slot in self._slots.items() if slot >= newest - MOST_SILENT_STEPS}
        return LinkTrendState(
            links=self.history.as_data(most),
            errors=self._errors.as_data(),
            expected={job: links for job, links in self._expected.items() if most and job in slots},
            slots=slots,
        )

    def restore(self, state: Any) -> None:
        known = _STATE.validate_python(state)
        errors = ErrorDrift()
        errors.restore(known["errors"])
        self.history.restore(known["links"])
        self._errors, self._expected, self._slots = errors, known["expected"], known["slots"]
        self._models = {}

    def drift(self) -> str:
        if not self._errors.drifted:
            return ""
        usual = self._errors.usual
        return (
            f"forecasts of links miss by more than they did, usually {usual:.2f} of their intervals' halves"
        )

    def subscribes(self) -> tuple[Subject, ...]:
        return (*super().subscribes(), COMPUTE)

    def on_instance_sample(self, sample: InstanceSample, at: float) -> None:
        slot = int(at // LinkHistory.step_s)
        before = self._slots.setdefault(sample.job, slot)
        if slot > before:
            self._slots[sample.job] = slot
            self._watch(sample.job, before)
        self.history.take(sample, at)

    def _watch(self, job: str, slot: int) -> None:
        """Compares the forecast for this slot, which has ended, with what came; then makes the next one."""
        expected = self._expected.get(job)
        if expected is not None and slot < expected["slot"]:
            return
        self._expected.pop(job, None)
        if expected is not None:
            try:
                truth = self.history.table(job, expected["links"], expected["slot"], 1)[0]
            except KeyError:
                pass  # a link has gone
            else:
                errors = np.abs(truth - expected["value"]) / np.maximum(expected["spread"], NARROWEST)
                self._errors.add(float(errors.mean()))
        forecasts = self.forecast(job, slot * LinkHistory.step_s)
        if forecasts:
            self._expected[job] = ExpectedLinks(
                slot=slot + self.config.ahead_steps,
                links=[forecast.link for forecast in forecasts],
                value=[forecast.expected_ms for forecast in forecasts],
                spread=[(forecast.high_ms - forecast.low_ms) / 2 for forecast in forecasts],
            )

    def on_job_event(self, event: JobEvent, at: float) -> None:
        if event.state in ENDED:
            self.history.forget(event.job)
            self._slots.pop(event.job, None)
            self._expected.pop(event.job, None)
            self._models.pop(event.job, None)

    def decide(self, view: JobView, now: float) -> Suggestions:
        forecasts = self.forecast(view.job, now)
        hot = {forecast.link: forecast for forecast in forecasts if forecast.hot >= self.config.report_from}
        if not hot:
            return None
        suggestions: list[PolicySuggestion] = []
        explained: set[Link] = set()
        for stage in view.stages:
            incoming: dict[str, list[LinkForecast]] = {}
            for instance in view.stage(stage, now):
                into = [forecast for forecast in forecasts if forecast.link[1] == instance.sid]
                if into:
                    incoming[instance.sid] = into
            chances = {sid: median(forecast.hot for forecast in into) for sid, into in incoming.items()}
            if not chances or min(chances.values()) >= 0.5:
                continue  # no instance of the stage is better
            for sid, chance in sorted(chances.items()):
                if chance < self.config.report_from or not view.is_due(
                    f"instance {sid}", now, self.config.valid_s / 2
                ):
                    continue
                expected_ms = median(forecast.expected_ms for forecast in incoming[sid])
                if not avoiding_pays(view, stage, sid, expected_ms, now):
                    continue
                explained.update(forecast.link for forecast in incoming[sid])
                suggestions.append(
                    self.avoid(
                        view,
                        sid,
                        valid_s=self.config.valid_s,
                        reason=_reason(sid, incoming[sid], self.config),
                        confidence=round(min(0.95, chance), 3),
                    )
                )
        rest = [forecast for link, forecast in sorted(hot.items()) if link not in explained]
        if rest and not suggestions and view.is_due("note", now, self.config.valid_s / 2):
            text = "; ".join(_describe(forecast) for forecast in rest[:4])
            confidence = round(max(forecast.hot for forecast in rest), 3)
            suggestions.append(self.note(view, f"links about to be slow: {text}", confidence=confidence))
        return suggestions or None

    def forecast(self, job: str, now: float) -> list[LinkForecast]:
        """Forecasts of all links of the job with enough history; empty if nothing can be forecast."""
        slot = int(now // LinkHistory.step_s)
        model, links = self._model(job, slot - slot % self.config.refit_steps)
        if model is None:
            return []
        names = set(self.history.links(job, slot, self.config.fit_steps, most=1 << 30))
        if not names.issuperset(links):
            return []  # a link has gone; the next fit is without it
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
        """The model of the history up to `slot`, fitted once per slot."""
        cached = self._models.get(job)
        if cached is None or cached[0] != slot:
            names = self.history.links(job, slot, self.config.fit_steps, self.config.most_links)
            values = self.history.table(job, names, slot, self.config.fit_steps)
            config = ForecastConfig(horizon=self.config.ahead_steps)
            ready = bool(names) and serial_correlation(values).forecastable
            cached = self._models[job] = (slot, tuple(names), fit(values, config) if ready else None)
        return cached[2], cached[1]


def _describe(forecast: LinkForecast) -> str:
    return (
        f"{forecast.link[0]} → {forecast.link[1]} {forecast.now_ms:.1f} ms now, "
        f"{forecast.expected_ms:.1f} ms ({forecast.low_ms:.1f}–{forecast.high_ms:.1f}) expected, "
        f"hot with {forecast.hot:.0%}"
    )


def _reason(sid: str, into: list[LinkForecast], config: LinkTrendConfig) -> str:
    worst = max(into, key=lambda forecast: forecast.hot)
    ahead = config.ahead_steps * LinkHistory.step_s
    return f"links into {sid} in {ahead:.0f} s, the worst of {len(into)}: {_describe(worst)}"
