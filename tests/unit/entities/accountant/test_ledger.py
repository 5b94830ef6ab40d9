"""Reports and claims in, charges out: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from entities.accountant.ledger import Charge, JobClaims, parts_of, take_report
from schemas.accounts import SLICE_S, CountedNode, SlotReport
from schemas.computed_work import MOST_MARKS, MOST_UNITS
from schemas.step import MicrobatchClaim
from tests.builders.accounts import T0, report, stretch
from tests.builders.steps import claim, member

NOW = T0 + 1000


def counted(reports: list[SlotReport], node: CountedNode = CountedNode()) -> Counter[tuple[str, str]]:
    """The seconds by payer and amount, after these reports."""
    found: Counter[tuple[str, str]] = Counter()
    for each in reports:
        taken = take_report(node, each, NOW)
        node = taken.node
        for charge in taken.charges:
            for name, value in charge.amounts.items():
                found[charge.key.payer, name] += value
    return found


def a_day() -> list[SlotReport]:
    """Two slots for 1,000 s: slot 0 is idle, then of j1, j2, and idle; slot 1 of j1 all the time."""
    ends = [("", T0, 100.0), ("j1", T0 + 100, 400.0), ("j2", T0 + 400, 900.0), ("", T0 + 900, 1000.0)]
    reports = []
    for number, at_s in enumerate(range(50, 1001, 50)):
        at = T0 + at_s
        told = [
            stretch(0, began, min(T0 + end, at), payer=payer or None)
            for payer, began, end in ends
            if began < at
        ]
        reports.append(report(*told, stretch(1, T0, at), number=number, at=at))
    return reports


def test_lost_repeated_and_late_reports_change_nothing() -> None:
    """All that a report says counts from beginnings: the last one alone would do."""
    whole = counted(a_day())
    assert whole["j1", "held_s"] == pytest.approx(1300)
    assert whole["j2", "held_s"] == pytest.approx(500)
    assert whole["", "held_s"] == pytest.approx(200)
    assert whole["", "offered_s"] == pytest.approx(2000)
    for seed in range(20):
        chance = random.Random(seed)
        some = [each for each in a_day()[:-1] for _ in range(chance.choice((0, 1, 2)))]
        chance.shuffle(some)
        again = counted([*some, a_day()[-1]])
        assert {key: round(value, 6) for key, value in again.items()} == {
            key: round(value, 6) for key, value in whole.items()
        }, f"seed {seed}"


def test_slices_share_a_stretch_by_time() -> None:
    parts = list(parts_of(T0 + SLICE_S - 10, T0 + 2 * SLICE_S + 5))
    assert parts == [(T0, 10), (T0 + SLICE_S, SLICE_S), (T0 + 2 * SLICE_S, 5)]
    assert list(parts_of(T0, T0)) == []


def test_an_agent_that_begins_anew_tells_nothing_twice() -> None:
    """Its new incarnation may know of nothing before its own beginning, whatever it says."""
    before = take_report(CountedNode(), report(stretch()), NOW)
    lying = report(stretch(began=T0, until=T0 + 160), number=0, at=T0 + 160, incarnation="x2")
    taken = take_report(before.node, lying, NOW)
    held = sum(charge.amounts.get("held_s", 0) for charge in taken.charges)
    assert held == pytest.approx(60)


def test_a_report_of_another_time_is_refused() -> None:
    """A clock that is wrong by a year would fill thousands of slices."""
    strange = take_report(CountedNode(), report(at=T0 + 365 * 86_400), NOW)
    assert "another time" in strange.refused
    assert strange.charges == ()
    old = take_report(CountedNode(), report(stretch(began=0.0), since=0.0), NOW)
    assert len(old.charges) < 4 * 8 * 96


def test_energy_bytes_and_labels_go_with_the_seconds() -> None:
    first = take_report(
        CountedNode(), report(stretch(energy_j=500.0, sent_bytes=1000), price=3.6, carbon=400), NOW
    )
    (charge,) = [each for each in first.charges if "held_s" in each.amounts]
    assert charge.amounts["energy_j"] == 500
    assert charge.amounts["metered_s"] == charge.amounts["held_s"] == 100
    assert charge.amounts["label_price_s"] == pytest.approx(360)
    assert charge.amounts["label_carbon_s"] == pytest.approx(40_000)
    longer = report(stretch(until=T0 + 200, energy_j=900.0, sent_bytes=1500), number=1, at=T0 + 200)
    (more,) = [each for each in take_report(first.node, longer, NOW).charges if "held_s" in each.amounts]
    assert (more.amounts["energy_j"], more.amounts["sent_bytes"]) == (400, 500)


# --- claims -------------------------------------------------------------------------------------------------
def taken(claims: list[MicrobatchClaim], known: JobClaims | None = None) -> tuple[Counter[str], JobClaims]:
    known = known or JobClaims()
    found: Counter[str] = Counter()
    for each in claims:
        charge: Charge | None = known.take(each, T0, ("a", "cpu"), NOW)
        found.update({} if charge is None else charge.amounts)
    return found, known


def a_claim(step: int, microbatch: int, incarnation: str = "i1", ms: float = 10.0) -> MicrobatchClaim:
    owner = member("j-s0-r0", incarnation)
    return claim(microbatch, owner, step=step, forward_ms=ms, backward_ms=2 * ms)


def test_what_is_done_anew_is_recomputed_and_a_repetition_is_not() -> None:
    once, dead, redone = a_claim(0, 0), a_claim(0, 1), a_claim(0, 1, "i2", 11.0)
    found, _ = taken([once, once, dead, redone, dead])
    assert found["busy_s"] == pytest.approx(0.060)
    assert found["recomputed_s"] == pytest.approx(0.033)
    assert (found["units"], found["recomputed_units"]) == (3, 1)


def test_steps_that_a_roll_back_undid_are_recomputed() -> None:
    """However long ago they were: only the newest steps are known unit by unit."""
    found, known = taken([a_claim(step, number) for step in range(20) for number in range(4)])
    assert found["recomputed_units"] == 0
    again, _ = taken(
        [a_claim(step, number, "i2", 9.0) for step in range(10, 22) for number in range(4)], known
    )
    assert again["recomputed_units"] == 40
    assert again["units"] == 48


def test_counting_goes_on_after_a_restart_where_it_was() -> None:
    claims = [a_claim(step, number) for step in range(9) for number in range(4)]
    _, known = taken(claims[:30])
    restarted = JobClaims.of(known.counted())
    found, _ = taken([*claims[26:30], *claims[30:]], restarted)
    assert found["units"] == 6
    assert found["recomputed_units"] == 0


def test_a_flood_of_claims_takes_bounded_memory() -> None:
    """Instances run users' code; what they claim is kept by others, and travels in one message."""
    found, known = taken([a_claim(0, number) for number in range(MOST_UNITS + 100)])
    assert found["units"] == MOST_UNITS
    assert sum(len(step.units) for step in known.counted().steps) == MOST_UNITS
    again, _ = taken([a_claim(1, 0, ms=10.0 + number) for number in range(MOST_MARKS + 10)])
    assert again["units"] == MOST_MARKS


def test_times_that_no_device_can_have_spent_are_not_charged() -> None:
    for ms in (-5.0, float("inf"), float("nan"), 1e12):
        assert taken([a_claim(0, 0, ms=ms)])[0] == {}


def test_what_instances_that_serve_computed_goes_with_their_seconds() -> None:
    first = stretch(until=T0 + 100, busy_s=30.0, recomputed_s=5.0)
    second = stretch(until=T0 + 200, busy_s=70.0, recomputed_s=5.0)
    reports = [report(first, at=T0 + 100), report(second, number=1, at=T0 + 200)]
    node, sums = CountedNode(), {"busy_s": 0.0, "recomputed_s": 0.0}
    for each in (reports[0], reports[0], reports[1]):
        taken = take_report(node, each, T0 + 200)
        node = taken.node
        for charge in taken.charges:
            for name in sums:
                sums[name] += charge.amounts.get(name, 0.0)
    assert sums == {"busy_s": pytest.approx(70.0), "recomputed_s": pytest.approx(5.0)}
