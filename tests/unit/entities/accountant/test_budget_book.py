"""Whether budgets are used up, by whom, and which jobs that holds."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from entities.accountant.budget_book import BudgetMeter, budget_key, period_start
from entities.orchestrator.automation.budget_holds import hold_reason
from schemas.accounts import AccountRow
from schemas.queue import QueueShare
from schemas.tariff import BudgetRule, RateRow, Tariff
from tests.builders.accounts import T0, row, slice_of
from tests.builders.jobs import job, spec

TARIFF = Tariff(
    currency="EUR", clusters={"*": (RateRow(start=0.0, price_per_device_hour=4.0, price_per_kwh=0.0),)}
)


def meter(**budget: Any) -> BudgetMeter:
    return BudgetMeter(BudgetRule(**budget), TARIFF, T0)


def test_a_budget_is_near_then_used_up_and_says_by_whom() -> None:
    ruths = meter(user="ruth", cost=2.0, at_end="stop")
    ruths.take(
        [slice_of(row("j1", held_s=900.0), row("j2", held_s=300.0), row("j3", user="ann", held_s=9e3))]
    )
    assert ruths.use().state == "within"
    assert ruths.use().used == {"cost": pytest.approx(4 / 3)}
    ruths.take([slice_of(row("j1", held_s=1200.0), row("j2", held_s=300.0))])
    assert ruths.use().state == "near"
    ruths.take([slice_of(row("j1", held_s=900.0), start=T0 + 900)])
    used = ruths.use()
    assert used.state == "used up"
    assert used.why == "budget of user ruth: 2.667 of 2 EUR a month used (by j1 2.333, j2 0.3333)"
    assert hold_reason(job(user="ruth"), [used]) == f"held: {used.why}"
    assert hold_reason(job(user="ann"), [used]) == ""


def test_a_budget_that_warns_holds_nobody() -> None:
    warning = meter(user="ruth", device_hours=0.1)
    warning.take([slice_of(row(held_s=900.0))])
    assert warning.use().state == "used up"
    assert hold_reason(job(user="ruth"), [warning.use()]) == ""


def test_a_tenants_budget_holds_the_jobs_of_all_its_users() -> None:
    labs = meter(tenant="lab", kwh=1e-6, at_end="stop")
    labs.take([slice_of(row(tenant="lab", held_s=900.0))])
    assert hold_reason(job(user="ann", queue_share=QueueShare(tenant="lab")), [labs.use()])
    assert not hold_reason(job(user="ann"), [labs.use()])


def test_what_was_used_before_the_period_does_not_count() -> None:
    ruths = meter(user="ruth", device_hours=1.0)
    ruths.take([slice_of(row(held_s=900.0), start=T0 - 900)])
    assert ruths.use().used == {"device_hours": 0}


def test_periods_begin_with_days_weeks_and_months() -> None:
    now = datetime.datetime(2026, 11, 29, 15, 30, tzinfo=datetime.UTC).timestamp()

    def began(per: str) -> str:
        at = period_start(BudgetRule.model_validate({"user": "a", "cost": 1, "per": per}), now)
        return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%m-%d %H:%M")

    assert [began(per) for per in ("day", "week", "month")] == ["11-29 00:00", "11-23 00:00", "11-01 00:00"]
    assert period_start(BudgetRule(user="a", cost=1, per="all"), now) == 0


def test_a_budget_with_another_limit_is_the_same_budget() -> None:
    assert budget_key(BudgetRule(user="a", cost=1)) == budget_key(BudgetRule(user="a", cost=2))
    assert budget_key(BudgetRule(user="a", cost=1)) != budget_key(BudgetRule(tenant="a", cost=1))


def test_a_services_budget_holds_its_versions_and_a_users_has_their_part_of_its_work() -> None:
    version = row("v", user="owner", service="chat", held_s=900.0, busy_s=300.0)
    tokens = AccountRow(
        payer_kind="service", payer="v/ruth", user="ruth", service="chat", tokens=5, answers=1
    )
    slices = [slice_of(version, tokens, row("j1", user="owner", held_s=60.0))]
    chats = meter(service="chat", device_hours=0.2, at_end="stop")
    chats.take(slices)
    used = chats.use()
    assert (used.state, used.used) == ("used up", {"device_hours": pytest.approx(0.25)})
    assert used.why == "budget of service chat: 0.25 of 0.2 device-hours a month used (by v 0.25)"
    assert hold_reason(job(user="owner", spec=spec(serve={"service": "chat"})), [used]) == f"held: {used.why}"
    assert hold_reason(job(user="owner"), [used]) == ""
    assert hold_reason(job(user="owner", spec=spec(serve={"service": "other"})), [used]) == ""
    ruths = meter(user="ruth", device_hours=1.0)
    ruths.take(slices)
    assert ruths.use().used == {"device_hours": pytest.approx(300 / 3600)}
    owners = meter(user="owner", device_hours=1.0)
    owners.take(slices)
    assert owners.use().used == {"device_hours": pytest.approx(660 / 3600)}
