"""What a statement says of slices, by prices of their time."""

from __future__ import annotations

from pathlib import Path

import pytest

from entities.accountant.prices_file import parse_tariff, read_tariff
from entities.accountant.statement import make_statement
from schemas.accounts import SLICE_S
from schemas.errors import BadInput
from schemas.tariff import Tariff, flat_tariff
from schemas.usage import Prices
from tests.builders.accounts import T0, row, slice_of

PRICES = """
currency: EUR
watts: {cpu: {busy: 100, idle: 20}}
clusters:
  a:
    - {from: 1793520000, price_per_device_hour: 1.0, price_per_kwh: 0.5, g_co2e_per_kwh: 100}
    - {from: 1793520900, price_per_device_hour: 3.0, price_per_kwh: 0.5, g_co2e_per_kwh: 300}
"""
BUSY = {"held_s": 900.0, "busy_s": 450.0, "recomputed_s": 90.0, "units": 50, "recomputed_units": 9}


def test_a_statement_closes_and_its_kinds_add_up() -> None:
    slices = [slice_of(row(**BUSY), row("", held_s=850.0, offered_s=1800.0))]
    made = make_statement(slices, Tariff(), "job", T0, T0 + SLICE_S)
    (line,) = made.lines
    assert line.busy_s + line.waiting_s + line.recomputed_s == pytest.approx(line.held_s)
    assert line.waiting_s == pytest.approx(360)
    assert made.unaccounted_s == pytest.approx(50)
    assert made.idle is not None
    assert made.idle.held_s == 850


def test_prices_and_carbon_are_those_of_the_time() -> None:
    tariff = parse_tariff(PRICES, "p")
    slices = [slice_of(row(**BUSY)), slice_of(row(**BUSY), start=T0 + SLICE_S)]
    (line,) = make_statement(slices, tariff, "user", T0, T0 + 2 * SLICE_S).lines
    kwh = (540 * 100 + 360 * 20) / 3.6e6
    assert line.name == "ruth"
    assert line.kwh == pytest.approx(2 * kwh)
    assert line.measured == 0
    assert line.price == pytest.approx(0.25 * 1 + 0.25 * 3 + 2 * kwh * 0.5)
    assert line.g_co2e == pytest.approx(kwh * 400)


def test_measured_energy_stands_for_the_part_that_was_measured() -> None:
    tariff = parse_tariff(PRICES, "p")
    half = row(**BUSY | {"energy_j": 36_000.0, "metered_s": 450.0})
    (line,) = make_statement([slice_of(half)], tariff, "job", T0, T0 + SLICE_S).lines
    assert line.measured == pytest.approx(0.5)
    assert line.kwh == pytest.approx((36_000 + (540 * 100 + 360 * 20) / 2) / 3.6e6)


def test_labels_price_what_no_series_does() -> None:
    labelled = row(
        held_s=900.0, label_price_s=900 * 2.0, labelled_s=900.0, label_carbon_s=9e5, carbon_s=900.0
    )
    made = make_statement([slice_of(labelled)], Tariff(), "job", T0, T0 + SLICE_S)
    assert made.lines[0].price == pytest.approx(0.5)
    assert made.lines[0].g_co2e == pytest.approx(made.lines[0].kwh * 1000)


def test_what_has_no_price_is_said() -> None:
    tariff = parse_tariff(PRICES.replace("  a:", "  east:"), "p")
    made = make_statement([slice_of(row(**BUSY))], tariff, "job", T0, T0 + SLICE_S)
    assert made.lines[0].price is None
    assert "0.25 device-hours have no price" in made.notes[0]
    assert made.notes[1] == "prices: no cluster east has offered a slot here, only a"


def test_lines_by_tenant_and_of_one_user() -> None:
    others = row("j2", user="ann", tenant="lab", held_s=300.0)
    slices = [slice_of(row(**BUSY), others, row("", offered_s=1800.0, held_s=600.0))]
    by_tenant = make_statement(slices, Tariff(), "tenant", T0, T0 + SLICE_S)
    assert {line.name: line.held_s for line in by_tenant.lines} == {"none": 900, "lab": 300}
    own = make_statement(slices, Tariff(), "job", T0, T0 + SLICE_S, only="ann")
    assert [line.name for line in own.lines] == ["j2"]
    assert (own.idle, own.offered_s, own.total.held_s) == (None, 0, 300)
    assert make_statement(slices, Tariff(), "service", T0, T0 + SLICE_S).lines == ()


def test_flat_prices_are_a_tariff_too() -> None:
    tariff = flat_tariff(Prices(slot_hour=2.0, kwh=None, slot_watts=15))
    (line,) = make_statement([slice_of(row(**BUSY))], tariff, "job", T0, T0 + SLICE_S).lines
    assert line.price == pytest.approx(0.5)
    assert line.kwh == pytest.approx(900 * 15 / 3.6e6)


def test_the_example_is_right() -> None:
    tariff = read_tariff(Path(__file__).parents[4] / "examples" / "prices.yaml")
    assert {budget.owner for budget in tariff.budgets} == {"user ruth", "tenant lab"}
    assert tariff.mean("a", "price_per_kwh", 1793520000, 1793520900).known == 1
    assert tariff.mean("elsewhere", "g_co2e_per_kwh", 1793520000, 1793520900).mean == 380


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("clusters: {a: [{from: 2026-01-02}, {from: 2026-01-01}]}", "row 2 is from 2026-01-01T00:00Z"),
        ("clusters: {a: [{from: 2026-01-01, until: 2026-01-02}, {from: 2026-01-03}]}", "a gap from"),
        ("clusters: {a: [{from: 2026-01-01, until: 2026-01-04}, {from: 2026-01-03}]}", "an overlap from"),
        ("clusters: {a: [{from: 2026-01-01, price_per_kwh: -1}]}", "greater than or equal to 0, not -1"),
        ("clusters: {a: [{from: yesterday}]}", "'yesterday' is no time: write it as 2026-11-01T00:00Z"),
        ("clusters: {a: [{price_per_kwh: 1}]}", "Field required"),
        ("budgets: [{cost: 3}]", "budgets.0: a budget for nobody: give user, tenant, service or job"),
        ("budgets: [{user: a, tenant: b, cost: 3}]", "a budget for user and tenant: give one of them"),
        ("budgets: [{user: a}]", "a budget without a limit"),
        ("budgets: [{job: j, cost: 3, at_end: stop}]", "a job's budget only warns"),
        ("price: 3", "price: there is no such option"),
        ("[1, 2]", "give clusters, watts or budgets"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_tariff(text, "prices.yaml")
    assert said in refused.value.text
    assert refused.value.text.startswith("prices.yaml: ")
    assert "\n" not in refused.value.text
