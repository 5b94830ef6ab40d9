"""What a sweep came to: the objective of each trial, and the best. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dmsc.run_history.presentation import number, text
from dmsc.sweeps.schedule import ranked
from dmsc.sweeps.sweep_file import LOSS, VALIDATION_LOSS, Objective
from dmsc.sweeps.trials import SweepTrial
from schemas.base import Part
from schemas.curve import StepCurve
from schemas.job import JobRecord


class TrialResult(Part):
    """A trial as the sweep's table shows it. `objective` is of its last step, or of its last rung."""

    trial: int
    job: str
    state: str
    values: dict[str, Any]
    step: int
    objective: float | None


class SweepResult(Part):
    """A sweep's trials, the best first, and the best one's number; None: no trial has an objective."""

    sweep: str
    digest: str
    objective: Objective
    trials: tuple[TrialResult, ...]
    best: int | None


def objective_at(curve: StepCurve, step: int, objective: Objective) -> float | None:
    """The objective of the weights after `step` steps; None: not reported, or not yet."""
    if objective.metric == LOSS:
        if not curve.steps or curve.steps[-1] < step - 1:
            return None
        first = step - objective.last_steps
        losses = [loss for at, loss in zip(curve.steps, curve.loss, strict=True) if first <= at < step]
        if not losses:  # a long curve was thinned
            losses = [loss for at, loss in zip(curve.steps, curve.loss, strict=True) if at < step][-1:]
        return math.fsum(losses) / len(losses) if losses else None
    values = [
        _metric(point.loss, point.metrics, objective) for point in curve.validations if point.step == step
    ]
    return values[-1] if values else None


def last_objective(curve: StepCurve, objective: Objective) -> float | None:
    """The objective as reported last."""
    if objective.metric == LOSS:
        return objective_at(curve, curve.steps[-1] + 1, objective) if curve.steps else None
    return (
        _metric(curve.validations[-1].loss, curve.validations[-1].metrics, objective)
        if curve.validations
        else None
    )


def _metric(loss: float, metrics: Mapping[str, float], objective: Objective) -> float | None:
    return loss if objective.metric == VALIDATION_LOSS else metrics.get(objective.metric)


def reported(curves: Iterable[StepCurve]) -> list[str]:
    """The metrics that these curves have."""
    names = dict.fromkeys([LOSS])
    for curve in curves:
        for point in curve.validations:
            names |= dict.fromkeys([VALIDATION_LOSS, *point.metrics])
    return list(names)


def result_of(
    sweep: str,
    digest: str,
    objective: Objective,
    trials: Sequence[SweepTrial],
    records: Mapping[int, JobRecord],
    curves: Mapping[int, StepCurve],
) -> SweepResult:
    """The result so far; trials that were not submitted are left out.

    A trial that got further is better than one that was left out at an earlier rung: their objectives are
    not of the same step.
    """
    rows = {
        trial: TrialResult(
            trial=trial,
            job=record.job,
            state=(record.ends_as or record.state).value,
            values=trials[trial].values,
            step=record.step,
            objective=last_objective(curves[trial], objective) if trial in curves else None,
        )
        for trial, record in records.items()
    }
    values = {trial: row.objective for trial, row in rows.items() if row.objective is not None}
    by_value = ranked(values, minimise=objective.mode == "min")
    order = sorted(by_value, key=lambda trial: rows[trial].state != "done")
    order += [trial for trial in sorted(rows) if trial not in values]
    best = order[0] if values and math.isfinite(values[order[0]]) else None
    return SweepResult(
        sweep=sweep,
        digest=digest,
        objective=objective,
        trials=tuple(rows[trial] for trial in order),
        best=best,
    )


def result_table(result: SweepResult) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the table at the end; `*` marks the best trial."""
    paths = tuple(result.trials[0].values) if result.trials else ()
    columns = ("trial", "job", "state", "step", *paths, result.objective.metric)
    rows = [
        (
            str(row.trial),
            row.job,
            row.state,
            str(row.step),
            *(text(row.values[path]) for path in paths),
            number(row.objective) + ("*" if row.trial == result.best else ""),
        )
        for row in result.trials
    ]
    return columns, rows
