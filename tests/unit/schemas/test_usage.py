"""What a job has used: slots over time across restarts, energy across routers' restarts, and its price."""

from __future__ import annotations

import pytest

from schemas.usage import JobUsage, Prices, cost_of


def test_slots_are_counted_over_time_and_nothing_while_parked() -> None:
    usage = JobUsage().held(4, 100.0).held(3, 110.0).held(0, 130.0)
    assert usage.slot_s == 4 * 10 + 3 * 20
    usage = JobUsage.model_validate_json(usage.model_dump_json())  # another orchestrator goes on
    assert usage.held(2, 500.0).held(0, 600.0).slot_s == 100 + 200
    assert usage.held(2, 500.0).held(0, 400.0).slot_s == 100, "a clock that was set back takes nothing away"


def test_redone_steps_are_counted_apart() -> None:
    usage = JobUsage(slots=4).stepped(1.0, 0, redone=False).stepped(2.0, 3, redone=True)
    assert (usage.redone_steps, usage.redone_slot_s, usage.failed_attempts) == (1, 8.0, 3)


def test_energy_adds_up_over_routers_and_a_router_that_begins_anew() -> None:
    usage = JobUsage()
    for router, reading in (("a", 10.0), ("b", 5.0), ("a", 30.0), ("a", 4.0), ("b", 5.0)):
        usage = usage.metered(router, reading)
    assert usage.energy_j == 30 + 4 + 5


@pytest.mark.parametrize(
    ("prices", "price"),
    [
        (Prices(), None),
        (Prices(slot_hour=0.5), 1.0),
        (Prices(kwh=0.3, slot_watts=50), 0.03),
        (Prices(slot_hour=0.5, kwh=0.3, slot_watts=50), 1.03),
    ],
)
def test_the_price_of_two_slot_hours(prices: Prices, price: float | None) -> None:
    cost = cost_of(JobUsage().held(2, 0.0), prices, now=3600.0)
    assert cost.slot_hours == 2
    assert cost.price == (None if price is None else pytest.approx(price))
    assert "model" in cost.energy_from


def test_measured_energy_goes_before_the_model() -> None:
    cost = cost_of(JobUsage(slot_s=3600.0, energy_j=3.6e6), Prices(kwh=0.3), now=0.0)
    assert (cost.energy_kwh, cost.price) == (1.0, pytest.approx(0.3))
    assert "measured" in cost.energy_from
