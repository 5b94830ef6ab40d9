"""Which machines are ordered and given back: caps, budgets, gangs, idle time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from entities.provisioner.decision import PoolFacts, fits, next_due
from entities.provisioner.pool_state import ordered
from schemas.machines.demand import JobDemand, WantedSlots
from schemas.machines.records import MachineState as S
from tests.builders.machine_pools import NOW, decided, lacks, machine, orders, pool, record, returns


def test_machines_that_are_of_use_only_together_are_written_as_a_gang() -> None:
    together = decided(lacks("j1", 3)).orders[0]
    alone = decided(lacks("j1", 2)).orders[0]
    beyond = decided(lacks("j1", 0, wished=4)).orders[0]
    assert [each.is_gang for each in (together, alone, beyond)] == [True, False, False]
    written = ordered(record(), pool(), "m-cpu-", 2, "j1", "it lacks", NOW, is_gang=True)
    assert [(each.gang, each.gang_size) for each in written.machines] == [("m-cpu-1", 2)] * 2
    cut = ordered(record(), pool(), "m-cpu-", 1, "j1", "it lacks", NOW, is_gang=True)
    assert [(each.gang, each.gang_size) for each in cut.machines] == [("", 0)]


def test_what_a_job_lacks_is_ordered_in_whole_machines_with_a_reason() -> None:
    found = decided(lacks("j1", 3, reason="needs 3 slots"))
    assert orders(found) == [("cpu", 2, "j1")]
    assert found.orders[0].reason == "j1 lacks 3 of 3 slots: needs 3 slots"


def test_the_slot_that_one_job_leaves_of_a_machine_is_anothers() -> None:
    assert orders(decided(lacks("j1", 3), lacks("j2", 1), lacks("j3", 1))) == [
        ("cpu", 2, "j1"),
        ("cpu", 1, "j3"),
    ]


@pytest.mark.parametrize("state", [S.ORDERED, S.DOUBTED, S.STARTING])
def test_what_is_coming_is_not_ordered_again(state: S) -> None:
    there = {"cpu": (pool(), record(machine(1, state), machine(2, state)))}
    assert orders(decided(lacks("j1", 4), pools=there)) == []
    assert orders(decided(lacks("j1", 5), pools=there)) == [("cpu", 1, "j1")]


def test_a_job_that_pools_cannot_serve_whole_gets_none_and_leaves_all_to_the_next() -> None:
    found = decided(lacks("j1", 9), lacks("j2", 8))
    assert orders(found) == [("cpu", 4, "j2")]
    assert found.waits == ("j1 lacks 9 slots, pools give 8 (cpu: most 4): nothing is ordered",)


def test_all_machines_count_for_the_cap_until_they_have_ended() -> None:
    there = {"cpu": (pool(most=2), record(machine(1, S.DRAINING), machine(2, S.RELEASED)))}
    found = decided(lacks("j1", 1), pools=there)
    assert orders(found) == []
    assert "cpu: most 2" in found.waits[0]


def test_who_serves_a_job_for_the_least_money_comes_first_and_what_it_lacks_from_the_next() -> None:
    pools = {
        "dear": (pool(price=2.0, slots=1, budget=99), record(pool="dear")),
        "cheap": (pool(price=3.0, slots=2, most=1, budget=99), record(pool="cheap")),
    }
    assert orders(decided(lacks("j1", 3), pools=pools)) == [("cheap", 1, "j1"), ("dear", 1, "j1")]
    assert orders(decided(lacks("j1", 1), pools=pools)) == [("dear", 1, "j1")], "half of it would be idle"


@pytest.mark.parametrize(
    ("rules", "why"), [({}, "it has a price and no budget"), ({"budget": 0}, "budget is 0")]
)
def test_what_costs_money_is_ordered_only_within_a_budget_that_somebody_wrote(
    rules: dict[str, Any], why: str
) -> None:
    found = decided(lacks("j1", 1), pools={"cpu": (pool(price=1.0, **rules), record())})
    assert orders(found) == []
    assert found.waits == (f"j1 lacks 1 slots, pools give 0 (cpu: {why}): nothing is ordered",)


def test_a_machine_whose_node_is_away_for_a_moment_is_not_ordered_again() -> None:
    """A new leader of the orchestrator may not have heard of it yet."""
    there = record(machine(1, away_since=NOW - 29), machine(2, away_since=NOW - 31))
    assert orders(decided(lacks("j1", 4), pools={"cpu": (pool(away_s=30.0), there)})) == [("cpu", 1, "j1")]


def test_wishes_come_one_by_one_and_only_from_pools_that_grow() -> None:
    wish = JobDemand(job="j1", since=NOW, slots=2, wished=99, reason="is to have 5 replicas")
    assert orders(decided(wish)) == [("cpu", 4, "j1")]
    assert orders(decided(wish, pools={"cpu": (pool(grow=False), record())})) == []


@pytest.mark.parametrize(
    ("needs", "rules", "fitting"),
    [
        ({}, {}, True),
        ({"clusters": ("b",)}, {}, False),
        ({"clusters": ("b", "a")}, {}, True),
        ({"device": "cuda"}, {}, False),
        ({"device": "cuda"}, {"device": "cuda"}, True),
        ({"memory_bytes": 3 << 30}, {"memory_gib": 2.0}, False),
        ({"memory_bytes": 3 << 30}, {}, True),
        ({"precision": "bf16"}, {"precisions": ("fp32",)}, False),
        ({"bits_class": "x"}, {"bits_class": "y"}, False),
        ({"bits_class": "x"}, {}, True),
        ({"labels": {"region": "eu"}}, {"labels": {"region": "us"}}, False),
        ({"labels": {"pool": "cpu"}}, {}, True),
    ],
)
def test_only_pools_with_such_slots_are_asked(
    needs: dict[str, Any], rules: dict[str, Any], fitting: bool
) -> None:
    job = lacks("j1", 1, needs=WantedSlots(**needs))
    assert fits(pool(**rules), "cpu", job) is fitting
    assert bool(decided(job, pools={"cpu": (pool(**rules), record())}).orders) is fitting


def test_a_pool_that_turned_out_not_to_serve_a_job_is_not_asked_again() -> None:
    assert decided(lacks("j1", 1, unfit_pools=("a/cpu",))).waits == (
        "j1 lacks 1 slots, no pool has such slots: nothing is ordered",
    )
    assert orders(decided(lacks("j1", 1, unfit_pools=("b/cpu",)))), "another cluster's nodes"


def test_a_pool_rests_after_a_failure_and_stops_after_many() -> None:
    resting = {"cpu": (pool(), record(failures=1, rests_until=NOW + 30, failure="no quota"))}
    found = decided(lacks("j1", 1), pools=resting)
    why = "cpu: rests until 01:00:30 UTC after a failure: no quota"
    assert found.waits == (f"j1 lacks 1 slots, pools give 0 ({why}): nothing is ordered",)
    later = decided(lacks("j1", 1), pools=resting, now=NOW + 7)
    assert later.waits == found.waits, "the log says it once, and not each second"
    assert orders(decided(lacks("j1", 1), pools=resting, now=NOW + 31)) == [("cpu", 1, "j1")]
    stopped = {"cpu": (pool(failures=2), record(failures=2, failure="no quota"))}
    assert (
        "2 failures in a row, until it is reset; the last: no quota"
        in decided(lacks("j1", 1), pools=stopped).waits[0]
    )


def test_the_budget_pays_for_an_hour_of_each_machine_that_is_ordered() -> None:
    rules = pool(price=2.0, budget=5.0, most=9)
    assert orders(decided(lacks("j1", 4), pools={"cpu": (rules, record())})) == [("cpu", 2, "j1")]
    found = decided(lacks("j1", 5), pools={"cpu": (rules, record())})
    assert "(cpu: budget 5 a day)" in found.waits[0]
    assert orders(decided(lacks("j1", 1), pools={"cpu": (rules, record(spent=3.5))})) == []


def test_a_budget_that_is_nearly_used_up_empties_machines_and_a_used_one_takes_them() -> None:
    rules = pool(price=3.6, budget=5.0, drain_s=100.0)
    busy = machine(1, price=3.6, ordered_at=NOW - 1000)
    near = decided(pools={"cpu": (rules, record(busy, spent=3.92))})
    assert [(each.machine, each.at_once) for each in near.returns] == [("m-cpu-1", False)]
    over = decided(pools={"cpu": (rules, record(busy.model_copy(update={"state": S.DRAINING}), spent=4.1))})
    assert [(each.machine, each.at_once) for each in over.returns] == [("m-cpu-1", True)]
    assert decided(pools={"cpu": (rules, record(busy, spent=3.8))}).returns == ()


def test_an_idle_machine_goes_after_its_time_the_longest_idle_first_but_for_the_least() -> None:
    rules = pool(idle_s=60.0)
    there = record(
        machine(1, idle_since=NOW - 61),
        machine(2, idle_since=NOW - 70),
        machine(3, idle_since=NOW - 59),
        machine(4),
    )
    found = decided(pools={"cpu": (rules, there)})
    assert returns(found) == ["m-cpu-2", "m-cpu-1"]
    assert found.returns[0].reason == "no work for 70 s (idle_s 60)"
    assert returns(decided(pools={"cpu": (pool(idle_s=60.0, least=3), there)})) == ["m-cpu-2"]


def test_it_is_known_when_the_next_idle_machine_is_due() -> None:
    there = record(
        machine(1, idle_since=NOW - 61), machine(2, idle_since=NOW - 50), machine(3, idle_since=NOW - 9)
    )
    assert next_due({"cpu": PoolFacts(pool=pool(idle_s=60.0), record=there)}, NOW) == NOW + 10
    assert next_due({"cpu": PoolFacts(pool=pool(idle_s=60.0), record=record(machine(1)))}, NOW) == math.inf


def test_an_idle_machine_stays_while_the_rest_of_its_jobs_machines_is_coming() -> None:
    half = record(machine(1, idle_since=NOW - 500), machine(2, S.STARTING))
    job = lacks("j1", 2, 4)
    assert returns(decided(job, pools={"cpu": (pool(), half)})) == []


def test_idle_machines_stay_for_a_job_that_is_about_to_take_them() -> None:
    both = record(machine(1, idle_since=NOW - 500), machine(2, idle_since=NOW - 400))
    job = JobDemand(job="j1", since=NOW, slots=2, waits=True)
    assert returns(decided(job, pools={"cpu": (pool(), both)})) == ["m-cpu-1"]
    assert returns(decided(job.model_copy(update={"slots": 3}), pools={"cpu": (pool(), both)})) == []


def test_half_of_a_jobs_machines_is_given_back_where_the_rest_cannot_come() -> None:
    half = record(machine(1, idle_since=NOW - 500), failures=1, rests_until=NOW + 30, failure="none left")
    found = decided(lacks("j1", 2, 4), pools={"cpu": (pool(), half)})
    assert returns(found) == ["m-cpu-1"]
    assert orders(found) == []


def test_a_pool_that_only_says_what_it_would_do_keeps_no_other_from_ordering() -> None:
    pools = {
        "trial": (pool(dry_run=True), record(pool="trial")),
        "real": (pool(price=1.0, budget=99.0), record(pool="real")),
    }
    assert orders(decided(lacks("j1", 4), pools=pools)) == [("real", 2, "j1"), ("trial", 2, "j1")]
    found = decided(lacks("j1", 12), pools=pools)
    assert orders(found) == [("trial", 4, "j1")], "half of a job is not ordered"
    assert "(trial: dry_run: orders nothing; real: most 4)" in found.waits[0]
    held = record(machine(1, idle_since=NOW - 500, pool="real"), pool="real")
    waiting = lacks("j1", 10, 12)
    assert returns(decided(waiting, pools={**pools, "real": (pools["real"][0], held)})) == ["m-real-1"]


def test_the_least_is_there_without_demand() -> None:
    found = decided(pools={"cpu": (pool(least=2), record(machine(1)))})
    assert [(order.count, order.reason) for order in found.orders] == [(1, "least 2")]
