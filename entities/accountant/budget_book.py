"""Whether budgets are used up, and by whom. Pure."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Sequence

from entities.accountant.service_use import job_and_user, shared_by_use
from entities.accountant.statement import AccountTotals
from schemas.accounts import AccountRow, AccountSlice, BudgetUse
from schemas.tariff import BudgetRule, Tariff
from schemas.usage import HOUR_S

NAMED_USERS = 3
"""Jobs that are named as those which used a budget: the first ones by what they used."""
UNITS = {"cost": "", "device_hours": "device-hours", "kwh": "kWh", "g_co2e": "g CO2e"}


def budget_key(budget: BudgetRule) -> str:
    """The key of a budget: the same for the same owner and period, whatever its limits are."""
    return hashlib.sha256(f"{budget.owner} per {budget.per}".encode()).hexdigest()[:16]


def period_start(budget: BudgetRule, now: float) -> float:
    """When the budget's present period began, in UTC: a day, a week from Monday on, a month; `all`: 0."""
    at = datetime.datetime.fromtimestamp(now, datetime.UTC)
    day = at.replace(hour=0, minute=0, second=0, microsecond=0)
    begins = {
        "day": day,
        "week": day - datetime.timedelta(days=day.weekday()),
        "month": day.replace(day=1),
    }
    return begins[budget.per].timestamp() if budget.per in begins else 0.0


class BudgetMeter:
    """Adds up what one budget's owner has used in its period. A slice that has changed is added anew."""

    def __init__(self, budget: BudgetRule, tariff: Tariff, since: float) -> None:
        self.budget = budget
        self.since = since
        self._tariff = tariff
        self._by_slice: dict[int, dict[str, AccountTotals]] = {}

    def take(self, slices: Iterable[AccountSlice]) -> None:
        """Counts these slices, in the place of what was counted of them before."""
        for each in slices:
            if each.start < self.since:
                continue
            totals: dict[str, AccountTotals] = {}
            for row in shared_by_use(each.rows):
                if self._concerns(row):
                    job = job_and_user(row.payer)[0]
                    totals.setdefault(job, AccountTotals()).add(row, each.start, self._tariff)
            self._by_slice[each.start] = totals

    def _concerns(self, row: AccountRow) -> bool:
        budget = self.budget
        if row.payer_kind == "idle":
            return False
        if budget.user:
            return row.user == budget.user
        if budget.service:
            return row.service == budget.service
        return row.tenant == budget.tenant if budget.tenant else row.payer == budget.job

    def use(self) -> BudgetUse:
        """How much of it is used, and in words by which jobs."""
        by_job: dict[str, dict[str, float]] = {}
        for totals in self._by_slice.values():
            for job, total in totals.items():
                mine = by_job.setdefault(job, dict.fromkeys(UNITS, 0.0))
                for name, amount in _amounts(total).items():
                    mine[name] += amount
        limits = self.budget.limits()
        used = {name: sum(mine[name] for mine in by_job.values()) for name in limits}
        share, first = max((used[name] / most, name) for name, most in limits.items())
        state = "used up" if share >= 1 else "near" if share >= self.budget.warn_at else "within"
        shares = sorted(((mine[first], job) for job, mine in by_job.items()), reverse=True)
        return BudgetUse(
            budget=self.budget,
            since=self.since,
            used=used,
            share=share,
            state=state,
            why="" if state == "within" else self._why(first, used[first], limits[first], shares),
        )

    def _why(self, name: str, used: float, most: float, shares: Sequence[tuple[float, str]]) -> str:
        unit = UNITS[name] or self._tariff.currency
        named = [f"{job} {amount:.4g}" for amount, job in shares[:NAMED_USERS] if amount > 0]
        more = len(shares) - len(named)
        by = f" (by {', '.join(named)}{f' and {more} more' if more else ''})" if named else ""
        period = {"all": "in all", "day": "a day", "week": "a week", "month": "a month"}[self.budget.per]
        whose = f"budget of {self.budget.owner}"
        return f"{whose}: {used:.4g} of {most:.4g} {unit} {period} used{by}".replace("  ", " ")


def _amounts(total: AccountTotals) -> dict[str, float]:
    return {
        "cost": total.price + total.stored_price,
        "device_hours": total.held_s / HOUR_S,
        "kwh": total.kwh,
        "g_co2e": total.grams,
    }
