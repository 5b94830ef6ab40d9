"""What is believed of machines: by their driver, by their nodes, and by the clock."""

from __future__ import annotations

from typing import Any

import pytest

from entities.provisioner.pool_state import (
    DAY,
    Listing,
    machine_prefix,
    moved,
    observed,
    ordered,
    spent_today,
)
from schemas.errors import IllegalTransition
from schemas.machines.demand import MachineUse
from schemas.machines.records import MachineState as S
from schemas.machines.records import PoolRecord
from tests.builders.machine_pools import NOW, decided, machine, pool, record, returns, use


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


def states(found: PoolRecord) -> list[S]:
    return [each.state for each in found.machines]


def test_a_machine_that_its_driver_knows_starts_and_one_whose_node_is_there_has_joined() -> None:
    there = record(machine(1, S.ORDERED), machine(2, S.DOUBTED), machine(3, S.STARTING), failures=3)
    found = seen(there, "m-cpu-1", "m-cpu-2", "m-cpu-3", nodes=(use(3),))
    assert states(found) == [S.STARTING, S.STARTING, S.JOINED]
    assert found.failures == 0


def test_a_machine_that_has_work_when_it_joins_is_not_idle() -> None:
    found = seen(record(machine(1, S.STARTING)), "m-cpu-1", nodes=(use(1, 1),))
    assert found.machines[0].idle_since is None
    assert returns(decided(pools={"cpu": (pool(idle_s=0.0), found)})) == []


def test_an_order_in_flight_is_not_given_up_because_a_listing_lacks_it() -> None:
    assert states(seen(record(machine(1, S.ORDERED)))) == [S.ORDERED]
    assert states(seen(record(machine(1, S.STARTING)), at=NOW - 200)) == [S.STARTING], "an older listing"


def test_a_doubted_order_is_looked_for_until_its_time_is_over() -> None:
    doubted = machine(1, S.DOUBTED, since=NOW, ordered_at=NOW)
    assert states(seen(record(doubted), now=NOW + 59, doubt_s=60.0)) == [S.DOUBTED]
    assert states(seen(record(doubted), now=NOW + 61, at=NOW + 59, doubt_s=60.0)) == [S.DOUBTED]
    found = seen(record(doubted), now=NOW + 61, doubt_s=60.0)
    assert (states(found), found.failures, found.ended[0].id) == ([], 1, "m-cpu-1")


def test_a_machine_that_joins_before_it_is_listed_is_not_gone_when_its_node_is_away() -> None:
    new = record(machine(1, S.STARTING, since=NOW, ordered_at=NOW, unlisted=True))
    joined = seen(new, nodes=(use(1),), now=NOW + 5, doubt_s=60.0)
    assert states(seen(joined, now=NOW + 9, doubt_s=60.0)) == [S.JOINED]
    listed = seen(joined, "m-cpu-1", nodes=(use(1),), now=NOW + 20, doubt_s=60.0)
    assert states(seen(listed, now=NOW + 21, doubt_s=60.0)) == []


@pytest.mark.parametrize("state", [S.STARTING, S.RELEASED])
def test_a_machine_that_was_never_listed_may_still_come(state: S) -> None:
    """Its order has ended well, or it was given back meanwhile; its source takes a while to list it."""
    new = record(machine(1, state, since=NOW, ordered_at=NOW, unlisted=True))
    assert states(seen(new, now=NOW + 59, doubt_s=60.0)) == [state]
    found = seen(new, now=NOW + 61, doubt_s=60.0)
    assert (states(found), found.failures) == ([], int(state is S.STARTING))
    listed = seen(new, "m-cpu-1", now=NOW + 1, doubt_s=60.0)
    if state is S.STARTING:
        assert not listed.machines[0].unlisted
        assert states(seen(listed, now=NOW + 2, doubt_s=60.0)) == []


def test_a_machine_whose_node_never_joins_is_given_back_and_its_pool_rests_longer_each_time() -> None:
    late = machine(1, S.STARTING, ordered_at=NOW - 301)
    found = seen(record(late, failures=2), "m-cpu-1")
    assert states(found) == [S.RELEASED]
    assert (found.failures, found.rests_until) == (3, NOW + 120.0)


def test_a_machine_is_not_late_while_nobody_says_which_nodes_have_joined() -> None:
    """Its provisioner was away meanwhile: it may have joined, and have work."""
    late = record(machine(1, S.STARTING, ordered_at=NOW - 301))
    assert seen(late, "m-cpu-1", nodes=None) == late
    assert states(seen(late, "m-cpu-1", nodes=(use(1, 1),))) == [S.JOINED]


def test_machines_that_fail_together_are_one_failure() -> None:
    late = [machine(number, S.STARTING, ordered_at=NOW - 301) for number in range(1, 9)]
    found = seen(record(*late), *(each.id for each in late))
    assert (found.failures, found.rests_until) == (1, NOW + 30.0)
    again = record(machine(9, S.STARTING, ordered_at=NOW - 270), **found.model_dump(include={"failures"}))
    assert seen(again, "m-cpu-9", now=NOW + 31).failures == 2


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


def test_a_clock_that_was_ahead_stops_nothing_and_gives_no_money_back() -> None:
    ahead = NOW + 400 * DAY
    there = record(
        machine(1, idle_since=ahead, since=ahead, price=1.0, ordered_at=ahead),
        machine(2, S.RELEASED, since=ahead),
        machine(3, S.STARTING, since=ahead, ordered_at=ahead),
        day=int(ahead // DAY),
        spent=3.0,
        failures=1,
        rests_until=ahead + 30,
    )
    found = seen(there, "m-cpu-1", "m-cpu-3", nodes=(use(1),))
    found = seen(found, "m-cpu-1", "m-cpu-3", nodes=(use(1),), now=NOW + 1)
    assert [(each.id, each.idle_since) for each in found.machines] == [("m-cpu-1", NOW), ("m-cpu-3", None)]
    assert found.machines[1].ordered_at == NOW
    assert (found.day, found.spent) == (NOW // DAY, 3.0)
    assert found.rests_until == NOW + 30
    assert seen(found, "m-cpu-1", "m-cpu-3", nodes=(use(1),), now=NOW + DAY).spent == 0.0


def test_a_listing_from_before_the_clock_was_set_back_is_not_believed() -> None:
    there = record(machine(1, S.STARTING, ordered_at=NOW), machine(2, S.DOUBTED, ordered_at=NOW))
    assert states(seen(there, at=NOW + 3600)) == [S.STARTING, S.DOUBTED]


def test_machines_that_nobody_wrote_down_are_given_back_and_their_numbers_never_used() -> None:
    found = seen(record(), "m-cpu-7", "m-cpu-8", "other-cpu-1", "m-cpu-x", nodes=(use(8),))
    assert [(each.id, each.state) for each in found.machines] == [
        ("m-cpu-7", S.RELEASED),
        ("m-cpu-8", S.DRAINING),
    ]
    assert ordered(found, pool(), "m-cpu-", 1, "j", "why", NOW).machines[-1].id == "m-cpu-9"


def test_nobody_is_a_stray_while_nobody_says_what_it_does() -> None:
    unknown = seen(record(), "m-cpu-8", nodes=None)
    assert (unknown.machines, unknown.number) == ((), 8), "its name is taken all the same"
    assert states(seen(record(), "m-cpu-8", nodes=(use(8, 1),))) == [S.DRAINING]


def test_an_old_listing_makes_no_stray_of_a_machine_that_has_just_ended() -> None:
    ended = seen(record(machine(1, S.RELEASED)))
    assert seen(ended, "m-cpu-1", now=NOW + 1, at=NOW - 1).machines == ()
    assert states(seen(ended, "m-cpu-1", now=NOW + 2, at=NOW + 1)) == [S.RELEASED], "it came after all"


def test_an_illegal_move_names_the_machine() -> None:
    with pytest.raises(IllegalTransition, match="machine m-cpu-1: released → joined"):
        moved(machine(1, S.RELEASED), S.JOINED, "?", NOW)
