"""Which machines are ordered and given back: caps, budgets, gangs, idle time, and random runs of all that."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entities.provisioner.decision import PoolFacts, ProvisioningDecision, decide, fits, next_due
from entities.provisioner.pool_state import (
    DAY,
    Listing,
    given_back,
    machine_prefix,
    moved,
    observed,
    ordered,
    spent_today,
)
from schemas.errors import IllegalTransition
from schemas.machines.demand import JobDemand, MachineDemand, MachineUse, WantedSlots
from schemas.machines.pools import MachinePool
from schemas.machines.records import Machine, MachineState, PoolRecord

NOW = 20_000.0 * DAY + 3600.0
S = MachineState


def pool(**more: Any) -> MachinePool:
    return MachinePool.model_validate({"driver": "local", "most": 4, "slots": 2, **more})


def machine(number: int, state: MachineState = S.JOINED, pool: str = "cpu", **more: Any) -> Machine:
    fields = {"since": NOW - 100, "ordered_at": NOW - 100, **more}
    return Machine(id=f"m-{pool}-{number}", state=state, **fields)


def record(*machines: Machine, pool: str = "cpu", **more: Any) -> PoolRecord:
    fields = {"number": len(machines), "day": int(NOW // DAY), **more}
    return PoolRecord(pool=pool, machines=machines, **fields)


def lacks(job: str, lacking: int, slots: int | None = None, **more: Any) -> JobDemand:
    whole = lacking if slots is None else slots
    return JobDemand(job=job, since=NOW, slots=whole, lacking=lacking, waits=True, **more)


def decided(
    *jobs: JobDemand, now: float = NOW, pools: dict[str, tuple[MachinePool, PoolRecord]] | None = None
) -> ProvisioningDecision:
    pools = pools or {"cpu": (pool(), record())}
    facts = {name: PoolFacts(pool=rules, record=there) for name, (rules, there) in pools.items()}
    return decide(facts, MachineDemand(jobs=jobs), now)


def orders(decision: ProvisioningDecision) -> list[tuple[str, int, str]]:
    return [(order.pool, order.count, order.job) for order in decision.orders]


def returns(decision: ProvisioningDecision) -> list[str]:
    return [each.machine for each in decision.returns]


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
def test_what_is_coming_is_not_ordered_again(state: MachineState) -> None:
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
    assert decided(lacks("j1", 1, unfit_pools=("cpu",))).waits == (
        "j1 lacks 1 slots, no pool has such slots: nothing is ordered",
    )


def test_a_pool_rests_after_a_failure_and_stops_after_many() -> None:
    resting = {"cpu": (pool(), record(failures=1, rests_until=NOW + 30, failure="no quota"))}
    found = decided(lacks("j1", 1), pools=resting)
    assert found.waits == (
        "j1 lacks 1 slots, pools give 0 (cpu: rests for 30 s after a failure: no quota): nothing is ordered",
    )
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


def test_the_least_is_there_without_demand() -> None:
    found = decided(pools={"cpu": (pool(least=2), record(machine(1)))})
    assert [(order.count, order.reason) for order in found.orders] == [(1, "least 2")]


# --- what is believed of machines -------------------------------------------------------------------------
def use(number: int, taken: int = 0, *, cordoned: bool = False) -> MachineUse:
    name = f"m-cpu-{number}"
    return MachineUse(sid=f"a-{name}", node=name, pool="cpu", slots=2, taken=taken, cordoned=cordoned)


def seen(
    there: PoolRecord,
    *names: str,
    nodes: tuple[MachineUse, ...] | None = (),
    now: float = NOW,
    at: float | None = None,
    **rules: Any,
) -> PoolRecord:
    listing = Listing(at=now if at is None else at, machines=frozenset(names))
    joined = None if nodes is None else {node.node: node for node in nodes}
    return observed(there, pool(**rules), machine_prefix("m", "cpu"), listing, joined, now)


def states(found: PoolRecord) -> list[MachineState]:
    return [each.state for each in found.machines]


def test_a_machine_that_its_driver_knows_starts_and_one_whose_node_is_there_has_joined() -> None:
    there = record(machine(1, S.ORDERED), machine(2, S.DOUBTED), machine(3, S.STARTING), failures=3)
    found = seen(there, "m-cpu-1", "m-cpu-2", "m-cpu-3", nodes=(use(3),))
    assert states(found) == [S.STARTING, S.STARTING, S.JOINED]
    assert found.failures == 0


def test_an_order_in_flight_is_not_given_up_because_a_listing_lacks_it() -> None:
    assert states(seen(record(machine(1, S.ORDERED)))) == [S.ORDERED]
    assert states(seen(record(machine(1, S.STARTING)), at=NOW - 200)) == [S.STARTING], "an older listing"


def test_a_doubted_order_is_looked_for_until_its_time_is_over() -> None:
    doubted = machine(1, S.DOUBTED, since=NOW, ordered_at=NOW)
    assert states(seen(record(doubted), now=NOW + 59, doubt_s=60.0)) == [S.DOUBTED]
    assert states(seen(record(doubted), now=NOW + 61, at=NOW + 59, doubt_s=60.0)) == [S.DOUBTED]
    found = seen(record(doubted), now=NOW + 61, doubt_s=60.0)
    assert (states(found), found.failures, found.ended[0].id) == ([], 1, "m-cpu-1")


def test_a_machine_whose_node_never_joins_is_given_back_and_its_pool_rests_longer_each_time() -> None:
    late = machine(1, S.STARTING, ordered_at=NOW - 301)
    found = seen(record(late, failures=2), "m-cpu-1")
    assert states(found) == [S.RELEASED]
    assert (found.failures, found.rests_until) == (3, NOW + 120.0)


def test_a_drained_machine_is_released_once_it_is_cordoned_and_empty() -> None:
    draining = record(machine(1, S.DRAINING))
    assert states(seen(draining, "m-cpu-1", nodes=(use(1),))) == [S.DRAINING], "it might still get work"
    assert states(seen(draining, "m-cpu-1", nodes=(use(1, 1, cordoned=True),))) == [S.DRAINING]
    assert states(seen(draining, "m-cpu-1", nodes=(use(1, cordoned=True),))) == [S.RELEASED]
    assert states(seen(draining, "m-cpu-1", nodes=None)) == [S.DRAINING], "nobody knows what runs there"
    gone = seen(record(machine(1, S.DRAINING, reason="no work")))
    assert (states(gone), gone.ended[0].reason) == ([], "no work"), "its agent ended by itself"


def test_a_machine_that_is_not_empty_long_after_its_deadline_is_released() -> None:
    draining = record(machine(1, S.DRAINING, since=NOW))
    busy = use(1, 1, cordoned=True)
    assert states(seen(draining, "m-cpu-1", nodes=(busy,), now=NOW + 149, drain_s=120.0)) == [S.DRAINING]
    assert states(seen(draining, "m-cpu-1", nodes=(busy,), now=NOW + 150, drain_s=120.0)) == [S.RELEASED]


def test_a_released_machine_has_ended_once_its_driver_no_longer_knows_it() -> None:
    released = record(machine(1, S.RELEASED, price=3.6, ordered_at=NOW - 1000))
    assert states(seen(released, "m-cpu-1")) == [S.RELEASED]
    found = seen(released)
    assert (states(found), found.spent) == ([], pytest.approx(1.0))
    assert spent_today(found, NOW + DAY) == 0.0


def test_work_and_its_end_are_noticed() -> None:
    busy = seen(record(machine(1, idle_since=NOW - 9)), "m-cpu-1", nodes=(use(1, 1),))
    assert busy.machines[0].idle_since is None
    idle = seen(busy, "m-cpu-1", nodes=(use(1),), now=NOW + 5)
    assert idle.machines[0].idle_since == NOW + 5
    assert seen(idle, "m-cpu-1", nodes=(use(1),), now=NOW + 9) == idle


def test_a_machine_that_vanished_has_ended_and_one_whose_node_stays_away_is_given_back() -> None:
    assert states(seen(record(machine(1)), nodes=())) == []
    away = seen(record(machine(1, idle_since=NOW - 999)), "m-cpu-1")
    assert states(away) == [S.JOINED], "however long it had no work before"
    assert (away.machines[0].away_since, away.machines[0].idle_since) == (NOW, None)
    assert states(seen(away, "m-cpu-1", now=NOW + 299)) == [S.JOINED]
    assert states(seen(away, "m-cpu-1", now=NOW + 300)) == [S.RELEASED]
    back = seen(away, "m-cpu-1", nodes=(use(1),), now=NOW + 9).machines[0]
    assert (back.away_since, back.idle_since) == (None, NOW + 9)


def test_machines_that_nobody_wrote_down_are_given_back_and_their_numbers_never_used() -> None:
    found = seen(record(), "m-cpu-7", "m-cpu-8", "other-cpu-1", "m-cpu-x", nodes=(use(8),))
    assert [(each.id, each.state) for each in found.machines] == [
        ("m-cpu-7", S.RELEASED),
        ("m-cpu-8", S.DRAINING),
    ]
    assert ordered(found, pool(), "m-cpu-", 1, "j", "why", NOW).machines[-1].id == "m-cpu-9"


def test_an_old_listing_makes_no_stray_of_a_machine_that_has_just_ended() -> None:
    ended = seen(record(machine(1, S.RELEASED)))
    assert seen(ended, "m-cpu-1", now=NOW + 1, at=NOW - 1).machines == ()
    assert states(seen(ended, "m-cpu-1", now=NOW + 2, at=NOW + 1)) == [S.RELEASED], "it came after all"


def test_an_illegal_move_names_the_machine() -> None:
    with pytest.raises(IllegalTransition, match="machine m-cpu-1: released → joined"):
        moved(machine(1, S.RELEASED), S.JOINED, "?", NOW)


# --- random runs ------------------------------------------------------------------------------------------
class World:
    """A cloud whose orders may fail, come late or unseen, with a leader that is killed at any moment."""

    def __init__(self, rules: MachinePool) -> None:
        self.rules = rules
        self.record = PoolRecord(pool="cpu")
        self.cloud: set[str] = set()
        self.late: set[str] = set()
        self.asked: list[str] = []
        self.joined: set[str] = set()
        self.cordoned: set[str] = set()
        self.now = NOW

    @property
    def nodes(self) -> tuple[MachineUse, ...]:
        there = sorted(self.joined & self.cloud)
        return tuple(
            MachineUse(
                sid=f"a-{name}", node=name, pool="cpu", slots=2, taken=0, cordoned=name in self.cordoned
            )
            for name in there
        )

    def step(self, need: int, fate: str, killed: bool) -> None:
        self.now += 10.0
        self.cloud |= self.late
        self.late.clear()
        self.joined |= self.cloud
        free = 2 * len([node for node in self.nodes if not node.cordoned])
        jobs = (lacks("j1", max(0, need - free), need),) if need > free else ()
        listing = Listing(at=self.now - 0.1, machines=frozenset(self.cloud))
        nodes = {node.node: node for node in self.nodes}
        self.record = observed(self.record, self.rules, "m-cpu-", listing, nodes, self.now)
        facts = {"cpu": PoolFacts(pool=self.rules, record=self.record)}
        found = decide(facts, MachineDemand(jobs=jobs, nodes=self.nodes), self.now)
        for order in found.orders:
            self.record = ordered(
                self.record, self.rules, "m-cpu-", order.count, order.job, order.reason, self.now
            )
        for each in found.returns:
            there = next(one for one in self.record.machines if one.id == each.machine)
            self.record = given_back(self.record, there, each.reason, self.now, at_once=each.at_once)
        assert len(self.record.machines) <= self.rules.most
        for one in self.record.machines:
            self.carry_out(one, fate, killed)

    def carry_out(self, one: Machine, fate: str, killed: bool) -> None:
        if one.state is S.ORDERED and one.id not in self.asked:
            self.asked.append(one.id)
            if fate in ("good", "unseen"):
                self.cloud.add(one.id)
            elif fate == "late":
                self.late.add(one.id)
        if one.state is S.ORDERED and (killed or fate != "good"):  # the next leader knows not how it ended
            doubted = moved(one, S.DOUBTED, "its leader ended", self.now)
            machines = tuple(doubted if each.id == one.id else each for each in self.record.machines)
            self.record = self.record.model_copy(update={"machines": machines})
        elif one.state is S.DRAINING:
            self.cordoned.add(one.id)
        elif one.state is S.RELEASED and not killed:
            self.cloud.discard(one.id)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["good", "unseen", "late", "lost"]), st.booleans()),
        max_size=40,
    )
)
def test_whatever_happens_caps_hold_no_name_is_ordered_twice_and_all_goes_back_to_zero(
    steps: list[tuple[int, str, bool]],
) -> None:
    world = World(pool(most=3, idle_s=20.0, boot_s=60.0, doubt_s=30.0, rest_s=10.0, failures=1000))
    for need, fate, killed in steps:
        world.step(need, fate, killed)
        assert len(world.asked) == len(set(world.asked))
        assert len(world.cloud) <= 3, "also counted where they are, and not only where they are written"
    for _ in range(40):
        world.step(0, "good", False)
    assert world.record.machines == ()
    assert world.cloud == set()
