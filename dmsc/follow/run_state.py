"""The state of a run as the views show it: takes job events and load. Pure; `live_view` draws it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from schemas.gateway_api import JobLoad
from schemas.job import ENDED, JobEvent, JobRecord, JobState, LiveInstanceView, StepResult
from schemas.job_file.recipe import MOST_STEPS

_recent_steps = 10
"""Steps over which shares, speed and the time left are averaged."""
_blocks = "▁▂▃▄▅▆▇█"
NOTICED = frozenset(
    {
        *("fault", "fault_choice", "recovery", "policy", "checkpoint", "skipped", "change", "recut", "alert"),
    }
)
"""The kinds of events whose text is shown."""


@dataclass(slots=True)
class RunState:
    """The state of one job. `steps` is its length, `done` the number of committed steps."""

    job: str
    name: str = ""
    state: JobState = JobState.QUEUED
    reason: str = ""
    steps: int = 0
    results: list[StepResult] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    instances: tuple[LiveInstanceView, ...] = ()
    notices: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=8))
    faults: int = 0
    sample: str | None = None
    service_ms: dict[str, float] = field(default_factory=dict)
    counted: str = "tokens"

    @classmethod
    def of(cls, record: JobRecord) -> RunState:
        spec = record.spec
        run = cls(record.job, spec.name, record.state, record.reason, spec.training.steps)
        run.counted = spec.data.counted
        return run

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_open(self) -> bool:
        """Whether it has no number of steps: it ends with its feed, or by a metric."""
        return self.steps >= MOST_STEPS

    @property
    def done(self) -> int:
        return self.results[-1].step + 1 if self.results else 0

    @property
    def last(self) -> StepResult | None:
        return self.results[-1] if self.results else None

    def apply(self, event: JobEvent) -> None:
        """Apply one event. A step that comes again after a roll-back replaces itself and all later steps."""
        if event.total_steps is not None:
            self.steps = event.total_steps
        if event.kind == "state" and event.state is not None:
            self.state, self.reason = event.state, event.text
        elif event.kind == "instances" and event.instances is not None:
            self.instances = event.instances
            self._fill_in()
        elif event.kind == "step" and event.result is not None:
            while self.results and self.results[-1].step >= event.result.step:
                self.results.pop()
            self.results.append(event.result)
        elif event.kind == "validation" and event.validation_loss is not None:
            self.validations.append((event.validation_step or self.done, event.validation_loss))
        elif event.kind == "sample":
            self.sample = event.sample
        elif event.kind in NOTICED and event.text:
            kind = "warning" if event.warning else event.kind
            self.faults += kind == "fault"
            self.notices.append((event.at, kind, event.text))

    def measured(self, load: JobLoad) -> None:
        """Apply the routers' current measurements. An instance without a new figure keeps its last one."""
        self.service_ms |= {entry.sid: entry.service_ms for entry in load.entries if entry.service_ms > 0}
        self._fill_in()

    def _fill_in(self) -> None:
        self.instances = tuple(
            view.model_copy(update={"service_ms": self.service_ms.get(view.sid, view.service_ms)})
            for view in self.instances
        )

    def tokens_per_s(self) -> float:
        """The mean speed over the recent steps; 0 before the first step."""
        recent = self.results[-_recent_steps:]
        seconds = sum(result.step_s for result in recent)
        return sum(result.tokens for result in recent) / seconds if seconds > 0 else 0.0

    def seconds_left(self) -> float | None:
        """The remaining time, by the recent steps' mean duration; None: no step yet, or no known end."""
        recent = self.results[-_recent_steps:]
        if not recent or self.is_open:
            return None
        return max(self.steps - self.done, 0) * sum(result.step_s for result in recent) / len(recent)

    def shares(self) -> dict[str, float]:
        """SID → the instance's share (0..1) of its stage's microbatches over the recent steps."""
        stage_of = {view.sid: (view.role, view.stage) for view in self.instances}
        counts: dict[str, int] = {}
        for result in self.results[-_recent_steps:]:
            for sid, count in result.shares.items():
                counts[sid] = counts.get(sid, 0) + count
        totals: dict[tuple[str, int] | None, int] = {}
        for sid, count in counts.items():
            totals[stage_of.get(sid)] = totals.get(stage_of.get(sid), 0) + count
        return {
            sid: count / totals[stage_of.get(sid)]
            for sid, count in counts.items()
            if totals[stage_of.get(sid)]
        }

    def sparkline(self, width: int = 32) -> str:
        """The losses so far as at most `width` block characters, each the mean of some steps."""
        return sparkline([result.loss for result in self.results], width)


def sparkline(values: list[float], width: int) -> str:
    """Draw values as block characters between their minimum and maximum; not finite values are `×`."""
    if not values or width < 1:
        return ""
    columns = min(width, len(values))
    cuts = [index * len(values) // columns for index in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    finite = [mean for mean in means if abs(mean) < float("inf")]
    if not finite:
        return "×" * columns
    low, span = min(finite), max(finite) - min(finite)
    top = len(_blocks) - 1
    return "".join(
        "×"
        if not abs(mean) < float("inf")
        else _blocks[round((mean - low) / span * top) if span else top // 2]
        for mean in means
    )


def duration(seconds: float | None) -> str:
    """Format seconds as `1:02:03` or `02:03`; None as `--:--`."""
    if seconds is None:
        return "--:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def quantity(value: float) -> str:
    """Format a number with three digits: `950`, `12.3k`, `4.56M`."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def metrics_in_words(metrics: Mapping[str, float]) -> str:
    """A validation's metrics but the loss, to be appended: `, accuracy 0.9310`; of sets `, test/loss …`."""
    return "".join(f", {name} {value:.4f}" for name, value in metrics.items() if name != "loss")
