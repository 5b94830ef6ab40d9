"""One version's suggestions, followed until it is known what they were worth.

A suggestion is judged by what happened while it was valid: from when it was made until its validity ended, a
later one of the same module took its place, or the job was over; at least 2 s, at most `horizon_s`. What
happened is read from the module's own `Observations`, so that scoring costs nothing per sample.

No clock, no I/O: the host of a live module and a replay feed it alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from bus.subject import Subject
from bus.subjects import FAULT_VERDICT
from policies.kit.engine import Event, Result
from policies.kit.view import JobView, Observations, topic
from policies.numerics.stage_balance import StageSituation, Worker
from policies.scoring.scores import Worth, avoidance_worth, move_worth, move_worth_by_model, weights_worth
from schemas.base import Message
from schemas.fault import FaultVerdict
from schemas.job import ENDED, JobEvent
from schemas.policy import (
    AvoidInstance,
    MoveInstance,
    PolicyDecision,
    PolicyScore,
    PolicySuggestion,
    SetWeights,
)
from schemas.registry import InstanceState
from schemas.stage_move import OPEN_MOVES, StageMove

NEEDS: tuple[Subject, ...] = (FAULT_VERDICT,)
"""Rows that scoring takes in besides those of every module."""

OVER = frozenset({InstanceState.FAULTED, InstanceState.GONE})
LEAST_WINDOW_S = 2.0
"""A suggestion is followed for so long also if another one takes its place sooner: two samples of each."""
LEAST_KNOWN_S = 1.0
"""One whose job is over sooner is not scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreboardConfig:
    """How long suggestions are followed."""

    horizon_s: float = 30.0
    """Seconds that a suggestion is followed at most. Longer sees more of what it did, and tells later."""

    move_s: float = 600.0
    """Seconds that the effect of a move that was carried out is waited for."""

    faults_kept: int = 256
    """Faults remembered per job, should the module turn out to be one that avoids instances."""


@dataclass(slots=True)
class _Open:
    """A suggestion whose worth is not known yet. `ended`: its job is over, nothing more will happen."""

    at: float
    id: str
    suggestion: PolicySuggestion
    view: JobView
    until: float
    adopted: bool = False
    fault: str = ""
    move: StageMove | None = None
    ended: bool = False


@dataclass(slots=True)
class _Faults:
    """What broke in a job. `avoiding`: the module has avoided an instance of it, so it claims to foresee."""

    seen: dict[tuple[str, str], None] = field(default_factory=dict)
    missed: list[tuple[float, int, str]] = field(default_factory=list)
    avoiding: bool = False


class Scoreboard:
    """Scores of one version of one module. `said` and `take` what happens, `settle` from time to time."""

    def __init__(
        self, module: str, version: str, observations: Observations, config: ScoreboardConfig | None = None
    ) -> None:
        self.module = module
        self.version = version
        self._observations = observations
        self._config = config or ScoreboardConfig()
        self._open: list[_Open] = []
        self._faults: dict[str, _Faults] = {}
        self._shadow = False

    def said(self, suggestion: PolicySuggestion, id: str, at: float) -> None:
        """The module has made this suggestion. Observations without a wish are not scored."""
        view = self._observations.jobs.get(suggestion.job)
        if view is None or suggestion.action.action == "none":
            return
        for one in self._open:
            if one.view is view and topic(one.suggestion) == topic(suggestion):
                one.until = min(one.until, max(at, one.at + LEAST_WINDOW_S))
        until = at + min(suggestion.valid_s, self._config.horizon_s)
        self._open.append(_Open(at=at, id=id, suggestion=suggestion, view=view, until=until))
        if isinstance(suggestion.action, AvoidInstance):
            self._faults.setdefault(suggestion.job, _Faults()).avoiding = True

    def take(self, events: Iterable[Event | Result]) -> None:
        """Before the observations do: the end of a job takes its view away."""
        for event in events:
            if isinstance(event, Event):
                self._take(event.message, event.at)

    def _take(self, message: Message, at: float) -> None:
        match message:
            case PolicyDecision():
                for one in self._open:
                    if one.id == message.suggestion:
                        one.adopted = message.adopted
                        self._shadow = not one.adopted and (
                            self._shadow or message.reason.startswith("in shadow")
                        )
            case FaultVerdict(job=str()):
                if message.verdict != "unfounded":
                    self._fault(message, at)
            case JobEvent():
                for one in self._open:
                    if one.suggestion.job == message.job:
                        self._happened(one, message, at)

    def _happened(self, one: _Open, event: JobEvent, at: float) -> None:
        action, move = one.suggestion.action, event.move
        moved = None if move is None or at < one.at else (move.sid, move.to_stage)
        if isinstance(action, MoveInstance) and moved == (action.sid, action.stage):
            one.move = move
        if event.state in ENDED:
            one.ended, one.until = True, min(one.until, at)

    def _fault(self, verdict: FaultVerdict, at: float) -> None:
        job = verdict.job
        assert job is not None
        faults = self._faults.setdefault(job, _Faults())
        if (verdict.sid, verdict.incarnation) in faults.seen:
            return
        faults.seen[verdict.sid, verdict.incarnation] = None
        foreseen = False
        for one in self._open:
            action = one.suggestion.action
            if isinstance(action, AvoidInstance) and action.sid == verdict.sid and at <= one.until:
                one.fault, foreseen = f"had a fault: {verdict.reason}", True
        if not foreseen and len(faults.missed) < self._config.faults_kept:
            view = self._observations.jobs.get(job)
            step = 0 if view is None else view.step
            faults.missed.append(
                (at, step, f"{verdict.sid} had a fault that was not foreseen: {verdict.reason}")
            )

    def settle(self, now: float, *, shadow: bool | None = None) -> list[PolicyScore]:
        """What has become known by now. `shadow`: how the module stands; None: as far as the
        decisions say."""
        ripe = [one for one in self._open if self._ripe(one, now)]
        if not ripe and not self._faults:
            return []
        self._open = [one for one in self._open if not self._ripe(one, now)]
        self._shadow = self._shadow if shadow is None else shadow
        found = [self._score(one) for one in ripe]
        for job, faults in self._faults.items():
            if faults.avoiding:
                found += [self._missed(job, *missed) for missed in faults.missed]
                faults.missed.clear()
        following = {one.suggestion.job for one in self._open} | self._observations.jobs.keys()
        self._faults = {job: faults for job, faults in self._faults.items() if job in following}
        return found

    def _ripe(self, one: _Open, now: float) -> bool:
        if one.ended:
            return True
        if one.move is not None and one.move.state in OPEN_MOVES:
            return now >= one.at + self._config.move_s
        return now >= one.until

    def _score(self, one: _Open) -> PolicyScore:
        said = one.suggestion
        worth = self._worth(one)
        return PolicyScore(
            module=self.module,
            version=self.version,
            job=said.job,
            suggestion=one.id,
            action=said.action.action,
            at=one.at,
            step=said.input_revision,
            shadow=self._shadow,
            confidence=said.confidence,
            adopted=one.adopted,
            score=worth.score,
            right=worth.right,
            reason=worth.reason,
        )

    def _missed(self, job: str, at: float, step: int, reason: str) -> PolicyScore:
        return PolicyScore(
            module=self.module,
            version=self.version,
            job=job,
            action="missed",
            at=at,
            step=step,
            shadow=self._shadow,
            confidence=0.0,
            adopted=False,
            score=0.0,
            right=False,
            reason=reason,
        )

    # --- by kind of action ----------------------------------------------------------------------------
    def _worth(self, one: _Open) -> Worth:
        if one.until - one.at < LEAST_KNOWN_S and not one.fault and one.move is None:
            return Worth(None, f"only followed for {max(0.0, one.until - one.at):.1f} s")
        action = one.suggestion.action
        match action:
            case SetWeights(stage=stage, weights=weights):
                return weights_worth(weights, _times(one, stage))
            case AvoidInstance(sid=sid):
                instance = one.view.instances.get(sid)
                times = {} if instance is None else _times(one, instance.stage, fresh=True)
                peers = [time for other, time in times.items() if other != sid]
                return avoidance_worth(sid, one.fault, times.get(sid), peers)
            case MoveInstance(sid=sid, stage=stage, forecast=forecast):
                measured = move_worth(forecast, one.move)
                if measured is not None:
                    return measured
                if one.move is not None:
                    return Worth(None, "carried out, but its effect is not known")
                stages, microbatches = _stages(one)
                return move_worth_by_model(forecast, stages, sid, stage, microbatches)
        return Worth(None, f"there is no score for {action.action}")


def _times(one: _Open, stage: int, *, fresh: bool = False) -> dict[str, float]:
    """Each instance's median service time, ms, while the suggestion was valid; with `fresh` only of those
    measured then, else of the others what was last measured: one that got no work is as fast as it was."""
    view = one.view
    sids = sorted(
        instance.sid
        for instance in view.instances.values()
        if instance.stage == stage and instance.state not in OVER and instance.samples
    )
    values, at = view.series("service_ms", sids), view.panel.times(sids)
    found: dict[str, float] = {}
    with np.errstate(invalid="ignore"):
        inside = (at > one.at) & (at <= one.until)
        before = at <= one.at
    for row, sid in enumerate(sids):
        during = values[row][inside[row]]
        earlier = values[row][before[row]]
        if during.size:
            found[sid] = float(median(during))
        elif earlier.size and not fresh:
            found[sid] = float(earlier[-1])
    return {sid: time for sid, time in found.items() if math.isfinite(time)}


def _stages(one: _Open) -> tuple[dict[int, StageSituation], int]:
    """All stages with their times while the suggestion was valid, and the microbatches of a step."""
    view = one.view
    stages: dict[int, StageSituation] = {}
    for stage in view.stages:
        times = _times(one, stage)
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
