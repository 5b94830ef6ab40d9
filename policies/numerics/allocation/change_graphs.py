"""A job as a graph with candidate changes, from what its instances and steps were measured to take. Pure.

Features of a node say how slow an instance is and how it became so: against the fastest of its stage and
against itself, now and in the mean, since when, how often before, and how evenly. Those of the job have what
present times alone would say of a change (`model_ms`). `outcome_network` reads both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.numerics.allocation.outcome_network import JOB_FEATURES, MARKS, NODE_FEATURES, ChangeGraphs
from policies.numerics.allocation.stage_balance import makespan_ms
from policies.numerics.features import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSpans:
    """Over how many seconds figures go. The network was trained with these."""

    recent_s: float = 3.0
    lately_s: float = 10.0
    long_s: float = 30.0


SPANS = GraphSpans()
SLOW = 1.25
"""Times the fastest of the stage: more is a slow spell."""
SPAN = 3.0
"""Largest feature that is a logarithm."""
ABSURD = 1e9
UNKNOWN_ABSENCE = 2.0
"""Where the stage has nobody else: all wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredJob:
    """What is known of a job's working instances, in the order of `sids`.

    Attributes:
        sids: names.
        stages: place of each one's stage in the pipeline, from 0 without gaps.
        service_ms: `(N, W)`, what a microbatch took, oldest first; NaN where nothing was sampled.
        times_s: `(N, W)`, when that was sampled.
        latest_ms: of the latest samples, whatever they say.
        counts: `(N, W)`, microbatches done by then.
        work: by stage, what a microbatch takes by the plan; 0 if unknown.
        steps_s: of the latest steps by the same instances, at least one.
        microbatches: of a step.
        room: whether there is a free slot for one that leaves.
        room_speed: of that slot, relative to those that the job has.
        moves: whether instances may change their stage.
        now_s: the present.
    """

    sids: tuple[str, ...]
    stages: npt.NDArray[np.int64]
    service_ms: Floats
    times_s: Floats
    latest_ms: tuple[float, ...]
    counts: Floats
    work: tuple[float, ...]
    steps_s: tuple[float, ...]
    microbatches: int
    room: bool
    room_speed: float = 1.0
    moves: bool = False
    now_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CandidateChange:
    """A change: who leaves, and to which stage; its own one: for another slot. `saves`: by formula."""

    node: int
    stage: int
    migrates: bool
    saves: float


def doubt_about(job: MeasuredJob) -> str:
    """What can't be used of the measurements; empty if all can."""
    for place, sid in enumerate(job.sids):
        known = job.service_ms[place][np.isfinite(job.times_s[place])]
        if not len(known):
            return f"{sid} has reported no service time"
        for took_ms in (*known, job.latest_ms[place]):
            if not 0 < took_ms < ABSURD:
                return f"{sid} has reported a service time of {took_ms:g} ms"
    if not job.steps_s or not all(np.isfinite(step) and step > 0 for step in job.steps_s):
        return "no step has a time that could be used"
    return ""


def model_ms(stages: Sequence[Sequence[float]], microbatches: int) -> float:
    """A step by its stages alone: the longest one, and a microbatch's way through the others."""
    busy = [makespan_ms(times, microbatches) for times in stages]
    longest = busy.index(max(busy))
    return busy[longest] + sum(min(times) for stage, times in enumerate(stages) if stage != longest)


def change_graphs(job: MeasuredJob, least: float = 0.03) -> tuple[list[CandidateChange], ChangeGraphs]:
    """The changes that present times or those of lately speak for, and the job's graph with each.

    Args:
        job: without doubts (`doubt_about`).
        least: what a change must save by formula to be a candidate, as a logarithm; most save nothing.
    """
    summary = _Summary(job)
    candidates = [candidate for candidate in summary.changes() if candidate.saves >= least]
    marks = np.zeros((len(candidates), len(job.sids), MARKS))
    features = np.zeros((len(candidates), JOB_FEATURES))
    for place, candidate in enumerate(candidates):
        marks[place, candidate.node, 0] = 1.0
        marks[place, :, 1] = job.stages == candidate.stage
        features[place] = summary.job_features(candidate)
    nodes = summary.node_features() if candidates else np.zeros((len(job.sids), NODE_FEATURES))
    return candidates, ChangeGraphs(nodes=nodes, stages=job.stages, marks=marks, job=features)


class _Summary:
    """One job's figures, computed once for all its candidates."""

    def __init__(self, job: MeasuredJob) -> None:
        self.job = job
        self.age_s = job.now_s - job.times_s
        self.known = np.isfinite(job.service_ms) & np.isfinite(job.times_s)
        self.recent_ms = self._within(SPANS.recent_s, np.median)
        self.lately_ms = self._within(SPANS.lately_s, np.mean)
        self.own_ms = np.array(
            [np.percentile(row[known], 20) for row, known in zip(job.service_ms, self.known, strict=True)]
        )
        count = int(job.stages.max()) + 1
        self.members = [np.flatnonzero(job.stages == stage) for stage in range(count)]
        self.usual_ms = np.array([self.own_ms[members].min() for members in self.members])
        self.planned_ms = self._planned_ms()
        self.recent = [list(self.recent_ms[members]) for members in self.members]
        self.lately = [list(self.lately_ms[members]) for members in self.members]
        self.present_ms = model_ms(self.recent, job.microbatches)
        self.lately_model_ms = model_ms(self.lately, job.microbatches)

    def _within(self, span_s: float, of: Callable[[Floats], Any]) -> Floats:
        """A figure of each instance's samples of the last seconds; of its last one if there are none."""
        found = []
        for row, age, known in zip(self.job.service_ms, self.age_s, self.known, strict=True):
            values = row[known & (age <= span_s)]
            found.append(float(of(values)) if len(values) else float(row[known][-1]))
        return np.array(found)

    # --- changes --------------------------------------------------------------------------------------
    def changes(self) -> list[CandidateChange]:
        """All that are possible, whatever they save."""
        found = []
        for node, stage in enumerate(self.job.stages):
            if self.job.room:
                found.append(self._change(node, int(stage)))
            if self.job.moves and len(self.members[stage]) > 1:
                others = (other for other in range(len(self.members)) if other != stage)
                found += [self._change(node, other) for other in others]
        return found

    def _change(self, node: int, stage: int) -> CandidateChange:
        return CandidateChange(node, stage, stage == self.job.stages[node], max(self._log_gains(node, stage)))

    def _log_gains(self, node: int, stage: int) -> list[float]:
        """By the model: if present times were to last, if those of lately were, and with slots as planned."""
        return [
            self._log_gain(node, stage, self.recent, self.usual_ms),
            self._log_gain(node, stage, self.lately, self.usual_ms),
            self._log_gain(node, stage, self.lately, self.planned_ms),
        ]

    def _log_gain(self, node: int, stage: int, times: list[list[float]], usual_ms: Floats) -> float:
        before = model_ms(times, self.job.microbatches)
        after = model_ms(self._changed(node, stage, times, usual_ms), self.job.microbatches)
        return float(np.clip(np.log(before / after), -SPAN, SPAN))

    def _planned_ms(self) -> Floats:
        """By stage, what its fastest would take if it were as fast for its work as the fastest of the job."""
        work = np.array(self.job.work)
        if not (work > 0).all():
            return self.usual_ms
        planned_ms: Floats = np.minimum(self.usual_ms, work * float((self.usual_ms / work).min()))
        return planned_ms

    def _changed(
        self, node: int, stage: int, times: list[list[float]], usual_ms: Floats
    ) -> list[list[float]]:
        own = int(self.job.stages[node])
        place = int(np.flatnonzero(self.members[own] == node)[0])
        changed = [list(row) for row in times]
        leaver_ms = changed[own].pop(place)
        if stage == own:
            changed[own].append(float(usual_ms[own]) / self.job.room_speed)
        else:
            changed[stage].append(leaver_ms * self._cost_ratio(own, stage))
        return changed

    def _cost_ratio(self, own: int, other: int) -> float:
        """How many times as long a microbatch of the other stage takes on the same device."""
        here, there = self.job.work[own], self.job.work[other]
        if here > 0 and there > 0:
            return there / here
        return float(self.usual_ms[other] / self.usual_ms[own])

    # --- features -------------------------------------------------------------------------------------
    def job_features(self, change: CandidateChange) -> list[float]:
        job, own = self.job, int(self.job.stages[change.node])
        rest = [list(row) for row in self.recent]
        rest[own].pop(int(np.flatnonzero(self.members[own] == change.node)[0]))
        absence = UNKNOWN_ABSENCE
        if rest[own]:
            absence = min(UNKNOWN_ABSENCE, float(np.log(model_ms(rest, job.microbatches) / self.present_ms)))
        steps_s = np.array(job.steps_s)
        step_s = float(np.median(steps_s[-3:]))
        history_s = float(np.nanmax(np.where(self.known, self.age_s, np.nan)))
        return [
            float(not change.migrates),
            *self._log_gains(change.node, change.stage),
            absence,
            float(np.log(job.microbatches / 10)),
            float(np.log(len(self.members))),
            float(np.log1p(history_s / 10)),
            _log(step_s / float(np.median(steps_s[-16:]))),
            _log(1e3 * step_s / self.present_ms),
            _log(step_s),
        ]

    def node_features(self) -> Floats:
        """`(N, NODE_FEATURES)`."""
        job = self.job
        usual = self.usual_ms[job.stages]
        last_ms = np.array([row[known][-1] for row, known in zip(job.service_ms, self.known, strict=True)])
        slow = self.known & (job.service_ms > SLOW * usual[:, None])
        busy = np.array([makespan_ms(times, job.microbatches) for times in self.recent])
        spells = [self._spells(*each) for each in zip(slow, self.known, self.age_s, strict=True)]
        done = self._done()
        share = np.ones(len(job.sids))
        for members in self.members:
            mean = done[members].mean()
            share[members] = done[members] / mean if mean > 0 else 1.0
        features = np.stack(
            [
                _logs(self.recent_ms / usual),
                _logs(self.recent_ms / self.own_ms),
                _logs(self.lately_ms / usual),
                _logs(self.lately_ms / self.planned_ms[job.stages]),
                _logs(last_ms / self.recent_ms),
                np.array([spell[0] for spell in spells]),
                np.array([spell[1] for spell in spells]),
                np.array([spell[2] for spell in spells]),
                self._scatter(),
                np.clip(share, 0, 3) - 1,
                np.array([1 / len(self.members[stage]) for stage in job.stages]),
                _logs(busy[job.stages] / busy.max()),
                np.clip(np.where(self.known, self.age_s, np.inf).min(axis=1) / 5, 0, 2),
            ],
            axis=1,
        )
        assert features.shape[1] == NODE_FEATURES
        return features

    def _spells(
        self, slow: npt.NDArray[np.bool_], known: npt.NDArray[np.bool_], age_s: Floats
    ) -> tuple[float, float, float]:
        """Part of the time that was slow, how long it has been so now, and how often that began."""
        slow, age_s = slow[known], age_s[known]
        long = age_s <= SPANS.long_s
        part = float(slow[long].mean()) if long.any() else float(slow[-1])
        began = np.flatnonzero(slow & ~np.concatenate([[False], slow[:-1]]))
        since_s = float(age_s[began[-1]]) if slow[-1] else 0.0
        return part, float(np.log1p(since_s)), min(4.0, float((age_s[began] <= SPANS.long_s).sum())) / 4

    def _scatter(self) -> Floats:
        """Standard deviation of the logarithm of lately's times."""
        found = []
        for row, age, known in zip(self.job.service_ms, self.age_s, self.known, strict=True):
            values = row[known & (age <= 2 * SPANS.lately_s)]
            found.append(float(np.log(values).std()) if len(values) > 1 else 0.0)
        scatter: Floats = np.clip(np.array(found), 0, SPAN)
        return scatter

    def _done(self) -> Floats:
        """Microbatches of each lately."""
        found = []
        for row, age, known in zip(self.job.counts, self.age_s, self.known, strict=True):
            counts = row[known & (age <= SPANS.lately_s)]
            found.append(float(counts[-1] - counts[0]) if len(counts) > 1 else 0.0)
        done: Floats = np.maximum(np.array(found), 0.0)
        return done


def _logs(ratios: Floats) -> Floats:
    found: Floats = np.clip(np.log(ratios), -SPAN, SPAN)
    return found


def _log(ratio: float) -> float:
    return min(max(math.log(ratio), -SPAN), SPAN)
