"""Prices and carbon over time, watts where nothing measures, and budgets: the file of `--prices`. Pure.

A series holds from each of its rows to the next one. What it does not say (no row yet, a field left out) has
no price, and a statement names how much that is.
"""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AliasChoices, Field, field_validator, model_validator

from schemas.base import Part, Time
from schemas.usage import Prices

Rate = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Limit = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
RateName = Literal["price_per_kwh", "price_per_device_hour", "g_co2e_per_kwh"]
EVERY_CLUSTER = "*"
"""In the place of a cluster's name: for those that have no series of their own."""
MOST_ROWS = 100_000


class RateRow(Part):
    """What things cost in a cluster from a time on, until the next row or its own `until`."""

    start: Time = Field(validation_alias=AliasChoices("from", "start"))
    until: Time | None = Field(None, description="only to check that there is no gap")
    price_per_kwh: Rate | None = None
    price_per_device_hour: Rate | None = None
    g_co2e_per_kwh: Rate | None = None

    @field_validator("start", "until", mode="before")
    @classmethod
    def _as_seconds(cls, value: Any) -> Any:
        return _seconds(value)


class Watts(Part):
    """What a device is taken to draw where it does not measure: while it computes, and while it does not."""

    busy: Rate = 15.0
    idle: Rate = 5.0


_OWNERS = ("user", "tenant", "service", "job")


class BudgetRule(Part):
    """The most that a user, a tenant, a service or a job may use in a period, and what happens then.

    `stop` holds the user's or tenant's jobs, or the service's versions: those that run park at a checkpoint,
    and all wait until the next period or a larger budget. A job's own budget only warns: `automation.budget`
    in its file bounds it.
    """

    user: str = Field("", max_length=120)
    tenant: str = Field("", max_length=120)
    job: str = Field("", max_length=120)
    service: str = Field("", max_length=120)
    cost: Limit | None = None
    device_hours: Limit | None = None
    kwh: Limit | None = None
    g_co2e: Limit | None = None
    per: Literal["day", "week", "month", "all"] = "month"
    at_end: Literal["stop", "warn"] = "warn"
    warn_at: float = Field(0.8, gt=0, le=1)

    def misfit(self) -> str:
        """Why it can't be a budget, with the remedy; empty: it can."""
        named = [name for name in _OWNERS if getattr(self, name)]
        if not named:
            return "a budget for nobody: give user, tenant, service or job"
        if len(named) > 1:
            return f"a budget for {' and '.join(named)}: give one of them"
        if not self.limits():
            return "a budget without a limit: give cost, device_hours, kwh or g_co2e"
        if self.job and self.at_end == "stop":
            return "a job's budget only warns: `automation.budget` in its file bounds what it uses"
        return ""

    def limits(self) -> dict[str, float]:
        """The limits that are given, by name."""
        names = ("cost", "device_hours", "kwh", "g_co2e")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def owner(self) -> str:
        """Whose it is, in words."""
        names = (f"{name} {getattr(self, name)}" for name in _OWNERS if getattr(self, name))
        return next(names, "nobody")


class MeanRate(NamedTuple):
    """The mean of a series over a time, and the share of the time for which it says anything."""

    mean: float
    known: float


class Tariff(Part):
    """What things cost at a mesh, and the budgets."""

    currency: str = Field("", max_length=12)
    clusters: dict[str, tuple[RateRow, ...]] = {}
    watts: dict[str, Watts] = Field({}, description="by kind of device; `*`: of all others")
    price_per_gib_month: Rate | None = Field(None, description="of what is stored; a month has 730 hours")
    price_per_sent_gib: Rate | None = None
    budgets: tuple[BudgetRule, ...] = Field((), max_length=1000)

    @model_validator(mode="after")
    def _budgets_are_someones(self) -> Self:
        seen: set[tuple[str, str]] = set()
        for number, budget in enumerate(self.budgets):
            why = budget.misfit()
            if not why and (budget.owner, budget.per) in seen:
                why = f"{budget.owner} has a budget per {budget.per} already: put all limits into one"
            if why:
                raise ValueError(f"budgets.{number}: {why}")
            seen.add((budget.owner, budget.per))
        return self

    @model_validator(mode="after")
    def _goes_forward(self) -> Self:
        for cluster, rows in self.clusters.items():
            if len(rows) > MOST_ROWS:
                raise ValueError(f"clusters.{cluster}: {len(rows)} rows, at most {MOST_ROWS}")
            for number, (row, later) in enumerate(pairwise(rows), start=2):
                if later.start <= row.start:
                    raise ValueError(
                        f"clusters.{cluster}: row {number} is from {_written(later.start)}, the one before "
                        f"it from {_written(row.start)}: give later times in later rows"
                    )
                if row.until is not None and row.until != later.start:
                    what = "a gap" if row.until < later.start else "an overlap"
                    raise ValueError(
                        f"clusters.{cluster}: {what} from {_written(min(row.until, later.start))} to "
                        f"{_written(max(row.until, later.start))}, before row {number}: let `until` be the "
                        "next row's `from`, or leave it out"
                    )
        return self

    def watts_of(self, kind: str) -> Watts:
        """What a device of this kind is taken to draw."""
        return self.watts.get(kind) or self.watts.get(EVERY_CLUSTER) or Watts()

    def mean(self, cluster: str, name: RateName, start: float, end: float) -> MeanRate:
        """The mean of a rate from `start` to `end`, over the part of that time for which it is known."""
        rows = self.clusters.get(cluster, self.clusters.get(EVERY_CLUSTER, ()))
        total = known_s = 0.0
        first = max(0, bisect_right(rows, start, key=lambda row: row.start) - 1)
        for number, row in enumerate(rows[first:], first):
            if row.start >= end:
                break
            ends = rows[number + 1].start if number + 1 < len(rows) else row.until or end
            part_s = min(ends, end) - max(row.start, start)
            rate = getattr(row, name)
            if part_s > 0 and rate is not None:
                total += rate * part_s
                known_s += part_s
        if not known_s:
            return MeanRate(0.0, 0.0)
        return MeanRate(total / known_s, min(1.0, known_s / (end - start)))

    def unknown_clusters(self, known: Iterable[str]) -> str:
        """One line that names clusters with prices that the mesh does not have; empty: there is none."""
        present = sorted(set(known))
        strange = sorted(set(self.clusters) - {EVERY_CLUSTER} - set(present))
        if not strange or not present:
            return ""
        return f"prices: no cluster {', '.join(strange)} has offered a slot here, only {', '.join(present)}"


def flat_tariff(prices: Prices) -> Tariff:
    """What the options of one price say, where there is no file."""
    watts = {EVERY_CLUSTER: Watts(busy=prices.slot_watts, idle=prices.slot_watts)}
    if prices.kwh is None and prices.slot_hour is None:
        return Tariff(watts=watts)
    row = RateRow(start=0.0, price_per_kwh=prices.kwh, price_per_device_hour=prices.slot_hour)
    return Tariff(clusters={EVERY_CLUSTER: (row,)}, watts=watts)


def _seconds(value: Any) -> Any:
    """Seconds since the epoch of what YAML makes of a time; a time without a zone is UTC."""
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{value!r} is no time: write it as 2026-11-01T00:00Z") from None
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        value = datetime.datetime.combine(value, datetime.time())
    if isinstance(value, datetime.datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
        return aware.timestamp()
    return value


def _written(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")
