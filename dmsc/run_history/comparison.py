"""Figures of several runs at equal steps, with the best marked. Pure."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dmsc.run_history.config_differences import KeyDifference, differences
from schemas.base import Part, Token
from schemas.curve import StepCurve
from schemas.errors import BadInput
from schemas.job import JobRecord
from schemas.usage import JobCost, Prices, cost_of


class EqualStep(Part):
    """A figure of each job that has one at this step; `best`: with the lowest, if not all are equal."""

    step: int
    values: dict[str, float]
    best: tuple[Token, ...]


class RunSummary(Part):
    """One run in a comparison. `best_validation` is (step, loss)."""

    job: Token
    name: str
    state: str
    steps: int
    loss_last: float | None
    best_validation: tuple[int, float] | None
    tokens_per_s: float | None
    recoveries: int
    cost: JobCost


class Comparison(Part):
    """Several runs side by side."""

    runs: tuple[RunSummary, ...]
    config: tuple[KeyDifference, ...]
    losses: tuple[EqualStep, ...]
    validations: tuple[EqualStep, ...]


def distinct(jobs: Sequence[str]) -> list[str]:
    """The jobs, each once. Raises `BadInput` for fewer than two."""
    found = list(dict.fromkeys(jobs))
    if len(found) < 2:
        raise BadInput(f"compare {' '.join(found)}: name at least two different jobs; see `dmsc runs list`")
    return found


def compare(
    records: Sequence[JobRecord], curves: Mapping[str, StepCurve], prices: Prices, now: float
) -> Comparison:
    """Compare runs; `curves` has the curve of each."""
    jobs = distinct([record.job for record in records])
    losses = {job: dict(zip(curves[job].steps, curves[job].loss, strict=True)) for job in jobs}
    validations = {job: {point.step: point.loss for point in curves[job].validations} for job in jobs}
    return Comparison(
        runs=tuple(summary(record, curves[record.job], prices, now) for record in records),
        config=differences({record.job: record.spec for record in records}),
        losses=equal_steps(losses),
        validations=equal_steps(validations),
    )


def summary(record: JobRecord, curve: StepCurve, prices: Prices, now: float) -> RunSummary:
    rates = sorted(curve.tokens_per_s)
    return RunSummary(
        job=record.job,
        name=record.spec.name,
        state=record.state.value,
        steps=record.step,
        loss_last=record.loss_last,
        best_validation=best_validation(curve),
        tokens_per_s=rates[len(rates) // 2] if rates else None,
        recoveries=record.recoveries,
        cost=cost_of(record.usage, prices, now),
    )


def best_validation(curve: StepCurve) -> tuple[int, float] | None:
    """The step and loss of the lowest validation; of equal ones, the first."""
    found = [(point.loss, point.step) for point in curve.validations if math.isfinite(point.loss)]
    loss, step = min(found, default=(math.nan, -1))
    return None if step < 0 else (step, loss)


def equal_steps(values: Mapping[str, Mapping[int, float]]) -> tuple[EqualStep, ...]:
    """The steps that at least two runs have, in order; a run without such a step is left out there."""
    having = Counter(step for of_job in values.values() for step in of_job)
    common = sorted(step for step, count in having.items() if count > 1)
    return tuple(
        _at(step, {job: of_job[step] for job, of_job in values.items() if step in of_job}) for step in common
    )


def _at(step: int, values: dict[str, float]) -> EqualStep:
    finite = [value for value in values.values() if math.isfinite(value)]
    lowest, all_equal = min(finite, default=math.nan), len(set(values.values())) == 1
    best = () if all_equal else tuple(job for job, value in values.items() if value == lowest)
    return EqualStep(step=step, values=values, best=best)


def sampled(rows: Sequence[EqualStep], most: int) -> list[EqualStep]:
    """At most `most` rows, evenly spread, with the first and the last one."""
    if len(rows) <= most:
        return list(rows)
    chosen = {round(index * (len(rows) - 1) / (most - 1)) for index in range(most)} if most > 1 else {-1}
    return [rows[index] for index in sorted(chosen)]


def as_csv(jobs: Sequence[str], curves: Mapping[str, StepCurve]) -> str:
    """Every step of any run: a column of losses and one of validation losses for each job.

    A validation stands at the number of steps that the weights have seen, a loss at the number of its step.
    """
    losses = {job: dict(zip(curves[job].steps, curves[job].loss, strict=True)) for job in jobs}
    validations = {job: {point.step: point.loss for point in curves[job].validations} for job in jobs}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", *(f"loss:{job}" for job in jobs), *(f"validation_loss:{job}" for job in jobs)])
    steps = {step for columns in (losses, validations) for of_job in columns.values() for step in of_job}
    for step in sorted(steps):
        cells: list[Any] = [columns[job].get(step, "") for columns in (losses, validations) for job in jobs]
        writer.writerow([step, *cells])
    return text.getvalue()
