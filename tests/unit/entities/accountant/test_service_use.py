"""Who was given tokens by a version, counted once; and whose its work is."""

from __future__ import annotations

from typing import Any

import pytest

from entities.accountant.ledger import RowKey
from entities.accountant.payers import Payer, Payers
from entities.accountant.service_use import shared_by_use, take_use
from entities.accountant.statement import make_statement
from schemas.accounts import SLICE_S, AccountRow, CountedUses, ServiceUse, UseReport
from schemas.queue import QueueShare
from schemas.tariff import Tariff, flat_tariff
from schemas.usage import Prices
from tests.builders.accounts import T0, row, slice_of
from tests.builders.jobs import job, spec


def told(number: int, *uses: ServiceUse, at: float = T0 + 10, incarnation: str = "g1") -> UseReport:
    return UseReport(gateway="gateway-a", incarnation=incarnation, number=number, at=at, uses=uses)


def use(user: str = "ruth", *, began: float = T0, **amounts: int) -> ServiceUse:
    return ServiceUse(job="v", user=user, began=began, **amounts)


def given(user: str, tokens: int = 0, prompt_tokens: int = 0, answers: int = 1, **more: Any) -> AccountRow:
    """What a user was given by version `v` of the service `chat`."""
    amounts = {"tokens": tokens, "prompt_tokens": prompt_tokens, "answers": answers}
    return AccountRow(payer_kind="service", payer=f"v/{user}", user=user, service="chat", **amounts, **more)


def version(**amounts: Any) -> AccountRow:
    return row("v", user="owner", service="chat", **{"held_s": 900.0, "busy_s": 300.0} | amounts)


def counted(*reports: UseReport) -> dict[str, list[float]]:
    """Payer → prompt tokens, tokens and answers that these reports add."""
    sums: dict[str, list[float]] = {}
    known = CountedUses()
    for report in reports:
        taken = take_use(known, report, T0 + 20)
        known = taken.uses
        for charge in taken.charges:
            own = sums.setdefault(charge.key.payer, [0, 0, 0])
            for place, name in enumerate(("prompt_tokens", "tokens", "answers")):
                own[place] += charge.amounts[name]
    return sums


def test_lost_and_repeated_reports_change_nothing() -> None:
    first = told(0, use(prompt_tokens=5, tokens=10, answers=1))
    second = told(1, use(prompt_tokens=9, tokens=30, answers=2), use("ann", tokens=7, answers=1))
    third = told(2, use(prompt_tokens=9, tokens=30, answers=2), use("ann", tokens=9, answers=2))
    whole = {"v/ruth": [9, 30, 2], "v/ann": [0, 9, 2]}
    assert counted(first, second, third) == whole
    assert counted(first, first, third, second, third) == whole
    assert counted(third) == whole


def test_what_begins_anew_is_counted_on_top() -> None:
    before = told(5, use(tokens=10, answers=1))
    again = told(6, use(began=T0 + 200, tokens=4, answers=1))  # it was left out for a while
    restarted = told(0, use(began=T0 + 9, tokens=3, answers=1), incarnation="g2")
    assert counted(before, again, restarted) == {"v/ruth": [0, 17, 3]}


def test_a_report_of_another_time_is_refused() -> None:
    taken = take_use(CountedUses(), told(0, use(tokens=1), at=T0 + 10_000), T0)
    assert (taken.charges, taken.refused) == ((), "it is of another time: +10000 s by this clock")


def test_work_is_its_users_by_their_tokens_and_waiting_its_owners() -> None:
    rows = [
        version(energy_j=90.0, metered_s=900.0, recomputed_s=60.0),
        given("ruth", 200, 100),
        given("ann", 100),
    ]
    rows.append(row("j1", held_s=5.0))
    shared = shared_by_use(rows)
    held = {each.user: each.held_s for each in shared if each.payer == "v"}
    assert held == {"owner": 600.0, "ruth": pytest.approx(225.0), "ann": pytest.approx(75.0)}
    for name in ("held_s", "busy_s", "recomputed_s", "energy_j", "metered_s"):
        assert sum(getattr(each, name) for each in shared) == pytest.approx(
            sum(getattr(each, name) for each in rows)
        ), name
    (owner,) = [each for each in shared if each.user == "owner"]
    assert (owner.busy_s, owner.recomputed_s) == (0.0, 60.0)


def test_tensors_are_shared_by_answers_and_what_nobody_was_given_is_the_owners() -> None:
    shared = shared_by_use([version(), given("ruth", answers=3), given("ann")])
    assert {each.user: each.held_s for each in shared if each.payer == "v"} == {
        "owner": 600.0,
        "ruth": pytest.approx(225.0),
        "ann": pytest.approx(75.0),
    }
    for rows in (
        [version()],
        [version(busy_s=0.0), given("ruth", 5)],
        [version(held_s=0.0), given("ruth", 5)],
    ):
        assert [each for each in shared_by_use(rows) if each.payer == "v"] == rows[:1]


def test_a_statement_says_what_a_thousand_tokens_take() -> None:
    tariff = flat_tariff(Prices(slot_hour=4.0))
    slices = [slice_of(version(), given("ruth", 1500, 500), given("ann", 400), row("j1", held_s=100.0))]
    (line,) = make_statement(slices, tariff, "service", T0, T0 + SLICE_S).lines
    assert (line.name, line.held_s, line.busy_s, line.answers) == ("chat", 900.0, 300.0, 2)
    assert (line.prompt_tokens, line.tokens) == (500, 1900)
    assert line.device_s_per_1000 == pytest.approx(900 / 2.4)
    assert line.price_per_1000 == pytest.approx(1.0 / 2.4)
    users = {each.name: each for each in make_statement(slices, tariff, "user", T0, T0 + SLICE_S).lines}
    assert users["ruth"].held_s == pytest.approx(100 + 250.0)  # of j1, and five sixths of the work
    assert users["ann"].price == pytest.approx(50.0 * 4 / 3600)
    assert users["owner"].tokens == 0
    of_chat = make_statement(slices, tariff, "user", T0, T0 + SLICE_S, service="chat")
    assert {each.name for each in of_chat.lines} == {"ruth", "ann", "owner"}
    assert (of_chat.total.held_s, of_chat.idle, of_chat.service) == (900.0, None, "chat")
    (own,) = make_statement(slices, tariff, "job", T0, T0 + SLICE_S, only="ann").lines
    assert (own.name, own.held_s, own.tokens) == ("v", pytest.approx(50.0), 400)
    jobs = {each.name: each for each in make_statement(slices, Tariff(), "job", T0, T0 + SLICE_S).lines}
    assert jobs.keys() == {"v", "j1"}
    assert (jobs["v"].held_s, jobs["v"].tokens) == (900.0, 1900)


def test_whose_a_row_is() -> None:
    payers = Payers()
    served = spec(serve={"service": "chat"})
    payers.take(job("v", spec=served, user="owner", queue_share=QueueShare(tenant="lab")))
    payers.take(job("j1", user="ruth", queue_share=QueueShare(tenant="night")))
    assert payers.of(RowKey("job", "v", "a", "cpu")) == Payer("owner", "lab", "chat")
    assert payers.of(RowKey("service", "v/ruth", "", "")) == Payer("ruth", "night", "chat")
    assert payers.of(RowKey("service", "v/ann", "", "")) == Payer("ann", "", "chat")
    assert payers.of(RowKey("idle", "", "a", "cpu")) == Payer()
