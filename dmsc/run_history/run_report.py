"""What is told of one run: configuration, lineage, losses, seeds, recoveries and cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dmsc.run_history.comparison import best_validation
from dmsc.run_history.config_differences import flattened
from dmsc.run_history.lineage import Lineage, lineage_of
from schemas.base import Part, Token
from schemas.curve import Interruption, StepCurve
from schemas.data_account import DataAccount, account_of
from schemas.errors import BadInput
from schemas.job import JobRecord, JobSpec
from schemas.usage import JobCost, Prices, cost_of


class RunLosses(Part):
    """Training losses of the first and the last step; validations as (step, loss)."""

    first: float | None
    last: float | None
    validation_first: tuple[int, float] | None
    validation_last: tuple[int, float] | None
    validation_best: tuple[int, float] | None


class RunReport(Part):
    """One run. `seeds` are all keys of the job file that are called seed; times are since the epoch."""

    job: Token
    name: str
    user: str
    state: str
    reason: str
    submitted_at: float
    changed_at: float
    step: int
    steps: int
    losses: RunLosses
    seeds: dict[str, int]
    exact: bool
    lineage: Lineage
    recoveries: int
    failed_attempts: int
    interruptions: tuple[Interruption, ...]
    cost: JobCost
    config: JobSpec
    data: DataAccount | None = None


def run_report(
    record: JobRecord, curve: StepCurve, records: Iterable[JobRecord], prices: Prices, now: float
) -> RunReport:
    """The report of a run among all the mesh's jobs."""
    points = [(point.step, point.loss) for point in curve.validations]
    leaves: dict[str, Any] = flattened(record.spec.model_dump(mode="json"))
    return RunReport(
        job=record.job,
        name=record.spec.name,
        user=record.user,
        state=record.state.value,
        reason=record.reason,
        submitted_at=record.submitted_at,
        changed_at=record.changed_at,
        step=record.step,
        steps=record.spec.training.steps,
        losses=RunLosses(
            first=record.loss_first,
            last=record.loss_last,
            validation_first=points[0] if points else None,
            validation_last=points[-1] if points else None,
            validation_best=best_validation(curve),
        ),
        seeds={path: value for path, value in leaves.items() if path.split(".")[-1].endswith("seed")},
        exact=record.exact,
        lineage=lineage_of(record, records),
        recoveries=record.recoveries,
        failed_attempts=record.usage.failed_attempts,
        interruptions=curve.interruptions,
        cost=cost_of(record.usage, prices, now),
        config=record.spec,
        data=account_of(record),
    )


def priced(prices: Prices, given: str | None) -> Prices:
    """The prices with those of `--price slot-hour=0.4,kwh=0.3,slot-watts=40` in place of the mesh's.

    Raises:
        BadInput: The text names something else, or no number from 0.
    """
    if not given:
        return prices
    names = {"slot-hour": "slot_hour", "kwh": "kwh", "slot-watts": "slot_watts"}
    update: dict[str, float] = {}
    for item in given.split(","):
        name, _, value = item.partition("=")
        try:
            update[names[name.strip()]] = amount = float(value)
        except (KeyError, ValueError):
            amount = -1.0
        if not 0 <= amount < float("inf"):
            raise BadInput(f"--price {item}: write slot-hour=N, kwh=N or slot-watts=N, N a number from 0")
    return prices.model_copy(update=update)
