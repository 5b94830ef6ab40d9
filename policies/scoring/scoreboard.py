"""The suggestions of one module version, followed until they can be scored.

A suggestion is scored by the events while it was valid: from its time until its validity ended, a later one
of the same module replaced it, or the job was over; at least 2 s, at most `horizon_s`. The events are read
from the module's own `Observations`, so that scoring costs nothing per sample.

It has no clock and no I/O: a live module and a replay feed it in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from bus.subject_row import Subject
from bus.subjects import FAULT_VERDICT
from policies.kit.engine import Event, Result
from policies.kit.view import JobView, Observations, topic
from policies.numerics.allocation.stage_balance import StageSituation, Worker
from policies.scoring.scores import (
    Worth,
    avoidance_worth,
    change_worth,
    checkpoint_worth,
    failures_worth,
    fault_worth,
    move_worth_by_model,
    premise_worth,
    weights_worth,
)
from schemas.actions import (
    CheckpointNow,
    ExpectFailures,
    Migrate,
    Recut,
    Scale,
    SetAlgorithm,
    SetRate,
    SetReduction,
    SetWindow,
    forecast_of,
)
from schemas.base import Message
from schemas.changes import OPEN_CHANGES, Forecast, JobChange, JobObjective
from schemas.fault import FaultVerdict
from schemas.fault_choices import FaultAnswer, FaultChoice, FaultOutcome
from schemas.job import ENDED, JobEvent
from schemas.policy import (
    Detour,
    MoveInstance,
    PolicyDecision,
    PolicyScore,
    PolicySuggestion,
    SetWeights,
)
from schemas.registry import InstanceState

NEEDS: tuple[Subject, ...] = (FAULT_VERDICT,)
"""Rows that scoring takes in besides those of every module."""

MOST_STEPS = 64
"""Steps whose times are remembered of each suggestion."""

OVER = frozenset({InstanceState.FAULTED, InstanceState.GONE})


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreboardConfig:
    """How long suggestions are followed."""

    horizon_s: float = 30.0
    """Most seconds for which a suggestion is followed. Longer sees more of its effect, but scores later."""

    least_s: float = 2.0
    """A suggestion is followed at least this long, even if replaced: that gives two samples per instance."""

    least_known_s: float = 1.0
    """A suggestion that was followed for a shorter time, because its job ended, is not scored."""

    move_s: float = 600.0
    """Most seconds to wait for the effect of a change that is carried out, and for expected failures."""

    usual_failure_s: float = 14 * 86_400.0
    """Seconds between two failures of an instance, if nothing is known of it."""

    faults_kept: int = 256
    """Most faults remembered per job, in case the module avoids instances later."""

    answers_kept: int = 256
    """Most answers about faults whose outcome is awaited; beyond it the oldest are not scored."""


@dataclass(slots=True)
class _OpenSuggestion:
    """A suggestion that can't be scored yet. `ended`: its job is over, so that no more events will come."""

    at: float
    id: str
    suggestion: PolicySuggestion
    view: JobView
    until: float
    adopted: bool = False
    fault: str = ""
    change: JobChange | None = None
    steps_s: list[float] = field(default_factory=list)
    failures: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class _OpenAnswer:
    """An answer about a fault whose outcome is not known yet."""

    at: float
    id: str
    answer: FaultAnswer
    step: int


@dataclass(slots=True)
class _Faults:
    """The faults in a job. `avoiding`: the module has avoided an instance, so it should foresee faults."""

    seen: dict[tuple[str, str], None] = field(default_factory=dict)
    missed: list[tuple[float, int, str]] = field(default_factory=list)
    avoiding: bool = False


class Scoreboard:
    """Scores one version of one module. Call `follow` and `take` for each event, `settle` periodically."""

    def __init__(
        self, module: str, version: str, observations: Observations, config: ScoreboardConfig | None = None
    ) -> None:
        self.module = module
        self.version = version
        self._observations = observations
        self._config = config or ScoreboardConfig()
        self._open: list[_OpenSuggestion] = []
        self._faults: dict[str, _Faults] = {}
        self._answers: dict[str, _OpenAnswer] = {}
        self._outcomes: list[tuple[_OpenAnswer, FaultChoice]] = []
        self._shadow = False

    def follow(self, suggestion: PolicySuggestion, id: str, at: float) -> None:
        """Begins to follow a published suggestion. Notes without an action are not scored."""
        view = self._observations.jobs.get(suggestion.job)
        if view is None or suggestion.action.action == "none":
            return
        for entry in self._open:
            if entry.view is view and topic(entry.suggestion) == topic(suggestion):
                entry.until = min(entry.until, max(at, entry.at + self._config.least_s))
        failures = isinstance(suggestion.action, ExpectFailures)
        horizon_s = self._config.move_s if failures else self._config.horizon_s
        until = at + min(suggestion.valid_s, horizon_s)
        self._open.append(_OpenSuggestion(at=at, id=id, suggestion=suggestion, view=view, until=until))
        if isinstance(suggestion.action, Detour):
            self._faults.setdefault(suggestion.job, _Faults()).avoiding = True

    def follow_answer(self, answer: FaultAnswer, id: str, at: float) -> None:
        """Begins to follow an answer about a fault, by its question."""
        view = self._observations.jobs.get(answer.job)
        self._answers[answer.question] = _OpenAnswer(at, id, answer, 0 if view is None else view.step)
        while len(self._answers) > self._config.answers_kept:
            self._answers.pop(next(iter(self._answers)))

    def take(self, events: Iterable[Event | Result]) -> None:
        """Takes events. Call it before the observations take them, since a job's end removes its view."""
        for event in events:
            if isinstance(event, Event):
                self._take(event.message, event.at)

    def _take(self, message: Message, at: float) -> None:
        match message:
            case PolicyDecision():
                for entry in self._open:
                    if entry.id == message.suggestion:
                        entry.adopted = message.adopted
                        self._shadow = not entry.adopted and (
                            self._shadow or message.reason.startswith("in shadow")
                        )
            case FaultVerdict(job=str()):
                if message.verdict != "unfounded":
                    self._fault(message, at)
            case JobEvent():
                for entry in self._open:
                    if entry.suggestion.job == message.job:
                        self._take_job_event(entry, message, at)
                self._take_outcome(message)

    def _take_job_event(self, entry: _OpenSuggestion, event: JobEvent, at: float) -> None:
        if event.change is not None and at >= entry.at and _is_of(event.change, entry.suggestion):
            entry.change = event.change
        if at <= entry.until:
            entry.failures += event.kind == "recovery"
            if event.result is not None and len(entry.steps_s) < MOST_STEPS:
                entry.steps_s.append(event.result.step_s)
        if event.state in ENDED:
            entry.ended, entry.until = True, min(entry.until, at)

    def _take_outcome(self, event: JobEvent) -> None:
        choice = event.fault_choice
        if choice is not None and choice.outcome is not FaultOutcome.OPEN:
            answer = self._answers.pop(choice.question, None)
            if answer is not None:
                self._outcomes.append((answer, choice))
        if event.state in ENDED:
            self._answers = {
                question: answer
                for question, answer in self._answers.items()
                if answer.answer.job != event.job
            }

    def _fault(self, verdict: FaultVerdict, at: float) -> None:
        job = verdict.job
        assert job is not None
        faults = self._faults.setdefault(job, _Faults())
        if (verdict.sid, verdict.incarnation) in faults.seen:
            return
        faults.seen[verdict.sid, verdict.incarnation] = None
        foreseen = False
        for entry in self._open:
            action = entry.suggestion.action
            if at > entry.until:
                continue
            if isinstance(action, Detour) and action.sid == verdict.sid:
                entry.fault, foreseen = f"had a fault: {verdict.reason}", True
            elif isinstance(action, CheckpointNow) and entry.suggestion.job == job:
                entry.fault = f"{verdict.sid} had a fault: {verdict.reason}"
        if not foreseen and len(faults.missed) < self._config.faults_kept:
            view = self._observations.jobs.get(job)
            step = 0 if view is None else view.step
            faults.missed.append(
                (at, step, f"{verdict.sid} had a fault that was not foreseen: {verdict.reason}")
            )

    def settle(self, now: float, *, shadow: bool | None = None) -> list[PolicyScore]:
        """The scores that can be given by now.

        `shadow`: whether the module is in shadow; None: as the decisions say.
        """
        due = [entry for entry in self._open if self._is_due(entry, now)]
        if not due and not self._faults and not self._outcomes:
            return []
        self._open = [entry for entry in self._open if not self._is_due(entry, now)]
        self._shadow = self._shadow if shadow is None else shadow
        scores = [self._score(entry) for entry in due]
        scores += [self._score_of_answer(answer, choice) for answer, choice in self._outcomes]
        self._outcomes.clear()
        for job, faults in self._faults.items():
            if faults.avoiding:
                scores += [self._missed(job, *missed) for missed in faults.missed]
                faults.missed.clear()
        live_jobs = {entry.suggestion.job for entry in self._open} | self._observations.jobs.keys()
        self._faults = {job: faults for job, faults in self._faults.items() if job in live_jobs}
        return scores

    def _is_due(self, entry: _OpenSuggestion, now: float) -> bool:
        if entry.ended:
            return True
        if entry.change is not None and entry.change.state in OPEN_CHANGES:
            return now >= entry.at + self._config.move_s
        return now >= entry.until

    def _score(self, entry: _OpenSuggestion) -> PolicyScore:
        suggestion = entry.suggestion
        worth, forecast = self._worth(entry), forecast_of(suggestion.action)
        return self._policy_score(
            job=suggestion.job,
            suggestion=entry.id,
            action=suggestion.action.action,
            objective=forecast.objective if forecast is not None else JobObjective.TIME,
            at=entry.at,
            step=suggestion.input_revision,
            confidence=suggestion.confidence,
            adopted=entry.adopted,
            score=worth.score,
            right=worth.right,
            reason=worth.reason,
        )

    def _score_of_answer(self, entry: _OpenAnswer, choice: FaultChoice) -> PolicyScore:
        answer, worth = entry.answer, fault_worth(entry.answer, choice)
        return self._policy_score(
            job=answer.job,
            suggestion=entry.id,
            action="none" if answer.action is None else answer.action.action,
            at=entry.at,
            step=entry.step,
            confidence=answer.confidence,
            adopted=choice.by == self.module,
            score=worth.score,
            right=worth.right,
            reason=worth.reason,
        )

    def _missed(self, job: str, at: float, step: int, reason: str) -> PolicyScore:
        outcome = {"confidence": 0.0, "adopted": False, "score": 0.0, "right": False}
        return self._policy_score(job=job, action="missed", at=at, step=step, reason=reason, **outcome)

    def _policy_score(self, **fields: Any) -> PolicyScore:
        return PolicyScore(module=self.module, version=self.version, shadow=self._shadow, **fields)

    # --- by kind of action ----------------------------------------------------------------------------
    def _worth(self, entry: _OpenSuggestion) -> Worth:
        if entry.until - entry.at < self._config.least_known_s and not entry.fault and entry.change is None:
            return Worth(None, f"only followed for {max(0.0, entry.until - entry.at):.1f} s")
        action = entry.suggestion.action
        match action:
            case SetWeights(stage=stage, weights=weights):
                return weights_worth(weights, _times(entry, stage))
            case Detour(sid=sid):
                instance = entry.view.instances.get(sid)
                times = {} if instance is None else _times(entry, instance.stage, fresh=True)
                peers = [time for other, time in times.items() if other != sid]
                return avoidance_worth(sid, entry.fault, times.get(sid), peers)
            case MoveInstance(sid=sid, stage=stage, forecast=forecast):
                if entry.change is not None:
                    return _measured(forecast, entry.change)
                stages, microbatches = _stages(entry)
                return move_worth_by_model(forecast, stages, sid, stage, microbatches)
            case CheckpointNow():
                return checkpoint_worth(entry.fault)
            case ExpectFailures(between_s=between_s):
                usual_s = self._config.usual_failure_s / max(1, len(entry.view.instances))
                return failures_worth(between_s, usual_s, entry.until - entry.at, entry.failures)
        if (promised := forecast_of(action)) is not None:
            if entry.change is not None:
                return _measured(promised, entry.change)
            return premise_worth(promised, entry.steps_s)
        return Worth(None, f"there is no score for {action.action}")


def _is_of(change: JobChange, suggestion: PolicySuggestion) -> bool:
    """Whether a job's change is what this suggestion wanted."""
    if change.by != suggestion.module or change.takes_back:
        return False
    match suggestion.action:
        case MoveInstance(sid=sid, stage=stage):
            return (change.kind, change.sid, change.to_stage) == ("move", sid, stage)
        case Migrate(sid=sid):
            return (change.kind, change.sid) == ("migrate", sid)
        case Scale():
            return change.kind == "scale"
        case Recut():
            return change.kind == "recut"
        case SetWindow(stage=stage):
            return (change.kind, change.to_stage) == ("window", stage)
        case SetRate():
            return change.kind == "rate"
        case SetReduction(stage=stage):
            return (change.kind, change.to_stage) == ("reduction", stage)
        case SetAlgorithm():
            return change.kind == "algorithm"
    return False


def _measured(forecast: Forecast, change: JobChange) -> Worth:
    return change_worth(forecast, change) or Worth(None, "carried out, but its effect is not known")


def _times(entry: _OpenSuggestion, stage: int, *, fresh: bool = False) -> dict[str, float]:
    """Each instance's median service time, ms, while the suggestion was valid.

    An instance without a measurement then counts with its last one before, since it is as fast as it was;
    with `fresh` it is left out.
    """
    view = entry.view
    sids = sorted(
        instance.sid
        for instance in view.instances.values()
        if instance.stage == stage and instance.state not in OVER and instance.samples
    )
    values, at = view.series("service_ms", sids), view.panel.times(sids)
    times: dict[str, float] = {}
    with np.errstate(invalid="ignore"):
        inside = (at > entry.at) & (at <= entry.until)
        before = at <= entry.at
    for row, sid in enumerate(sids):
        during = values[row][inside[row]]
        earlier = values[row][before[row]]
        if during.size:
            times[sid] = float(median(during))
        elif earlier.size and not fresh:
            times[sid] = float(earlier[-1])
    return {sid: time for sid, time in times.items() if math.isfinite(time)}


def _stages(entry: _OpenSuggestion) -> tuple[dict[int, StageSituation], int]:
    """All stages with their times while the suggestion was valid, and the microbatches of a step."""
    view = entry.view
    stages: dict[int, StageSituation] = {}
    for stage in view.stages:
        times = _times(entry, stage)
        costs = [
            instance.sample.stage_cost_ms
            for instance in view.instances.values()
            if instance.stage == stage and instance.sample is not None
        ]
        workers = tuple(Worker(sid=sid, service_ms=time) for sid, time in times.items())
        stages[stage] = StageSituation(workers=workers, cost_ms=max(costs, default=0.0))
    results = [event.result for event in view.events if event.result is not None]
    done = sum(results[-1].shares.values()) if results else 0
    return stages, done // max(1, len(stages))
