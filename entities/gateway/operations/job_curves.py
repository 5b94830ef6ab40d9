"""Curves of jobs, folded from their events: each event is read once, however often a curve is asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field

from bus import subjects
from bus.connection import Bus
from schemas.curve import Interruption, StepCurve, ValidationPoint
from schemas.job import JobEvent, StepResult

FIGURES = ("loss", "gradient_norm", "learning_rate", "tokens_per_s", "step_s")
INTERRUPTIONS = frozenset({"fault", "recovery", "skipped"})
"""Kinds of events that a curve tells of beside its figures."""
INTERRUPTIONS_KEPT = 200
"""Of one job, the newest."""


@dataclass(frozen=True, kw_only=True)
class CurvesConfig:
    """What a gateway keeps of curves."""

    kept_points: int = 10_000  # of one job; a longer curve keeps every second step, then every fourth …
    kept_jobs: int = 32  # curves kept; the one that nobody asked for longest goes first
    readers: int = 4  # curves that are read at the same time
    yield_every: int = 200  # events folded in a row before the event loop serves others


@dataclass(frozen=True, slots=True)
class _Point:
    """A committed step without what a curve does not tell: a gateway keeps thousands of them."""

    sequence: int
    at: float
    step: int
    figures: tuple[float, ...]

    @classmethod
    def of(cls, sequence: int, at: float, result: StepResult) -> _Point:
        return cls(sequence, at, result.step, tuple(getattr(result, name) for name in FIGURES))


@dataclass
class CurveFold:
    """Takes a job's events in order. Pure. `stride`: only every so many-th step is kept, and the last one."""

    job: str
    kept_points: int = 10_000
    stride: int = 1
    next: int = 1
    first_step: int | None = None
    _points: list[_Point] = field(default_factory=list)
    _validations: list[tuple[int, ValidationPoint]] = field(default_factory=list)
    _interruptions: deque[tuple[int, Interruption]] = field(
        default_factory=lambda: deque(maxlen=INTERRUPTIONS_KEPT)
    )

    def add(self, sequence: int, event: JobEvent) -> None:
        """Take the event at this sequence of the stream. A repeated step replaces it and all later ones."""
        self.next = sequence + 1
        if event.kind == "step" and event.result is not None:
            self._step(_Point.of(sequence, event.at, event.result))
        elif event.kind == "validation" and event.validation_loss is not None:
            step = event.validation_step or 0
            point = ValidationPoint(step=step, at=event.at, loss=event.validation_loss, metrics=event.metrics)
            self._validate(sequence, point)
        elif event.kind in INTERRUPTIONS:
            step = self._points[-1].step if self._points else -1
            note = Interruption(at=event.at, step=step, kind=event.kind, text=event.text)
            self._interruptions.append((sequence, note))

    def _validate(self, sequence: int, point: ValidationPoint) -> None:
        known = self._validations
        while known and known[-1][1].step >= point.step:
            known.pop()
        known.append((sequence, point))
        if len(known) > self.kept_points:
            self._validations = known[-1::-2][::-1]  # every second one, and the last

    def _step(self, point: _Point) -> None:
        step, points = point.step, self._points
        self.first_step = step if self.first_step is None else min(step, self.first_step)
        while points and points[-1].step >= step:
            points.pop()
        if points and points[-1].step % self.stride:
            points.pop()  # it was there as the last one
        points.append(point)
        if len(points) > self.kept_points:
            self.stride *= 2
            self._points = _every(points, self.stride)

    def curve(self, start: int = 1, most: int = 2_000) -> StepCurve:
        """What came at sequence `start` and later, in at most about `most` points."""
        stride = self.stride
        points = self._points
        while len(points) > max(1, most):
            stride *= 2
            points = _every(points, stride)
        points = [point for point in points if point.sequence >= start]
        columns = {
            name: tuple(point.figures[index] for point in points) for index, name in enumerate(FIGURES)
        }
        return StepCurve(
            job=self.job,
            stride=stride,
            first_kept=self.first_step or 0,
            next=self.next,
            steps=tuple(point.step for point in points),
            at=tuple(point.at for point in points),
            validations=tuple(point for sequence, point in self._validations if sequence >= start),
            interruptions=tuple(note for sequence, note in self._interruptions if sequence >= start),
            **columns,
        )


def _every(points: list[_Point], stride: int) -> list[_Point]:
    """Every `stride`-th step, counted from step 0 so that all jobs keep the same ones, and the last point."""
    return [point for point in points[:-1] if point.step % stride == 0] + points[-1:]


class JobCurves:
    """The curves that a gateway was asked for."""

    def __init__(self, bus: Bus, config: CurvesConfig = CurvesConfig()) -> None:
        self._bus = bus
        self._config = config
        self._readers = asyncio.Semaphore(config.readers)
        self._folds: dict[str, tuple[asyncio.Lock, CurveFold]] = {}

    async def of(self, job: str, start: int = 1, most: int = 2_000) -> StepCurve:
        """The curve of a job up to now. A job without events has an empty one."""
        fresh = asyncio.Lock(), CurveFold(job, self._config.kept_points)
        lock, fold = self._folds[job] = self._folds.pop(job, fresh)  # the newest are at the end
        while len(self._folds) > self._config.kept_jobs:
            del self._folds[next(iter(self._folds))]
        async with lock, self._readers:
            events = self._bus.history(subjects.JOB_EVENT, start=fold.next, job=job)
            async with contextlib.aclosing(events):
                count = 0
                async for recorded in events:
                    if isinstance(recorded.message, JobEvent):
                        fold.add(recorded.sequence, recorded.message)
                    count += 1
                    if count % self._config.yield_every == 0:
                        await asyncio.sleep(0)
        return fold.curve(start, most)
