"""Who sends which sum of a tied stage to whom, whatever happens to the stages meanwhile."""

from __future__ import annotations

from schemas.step import Member
from workers.stage.tied_sums import TiedSums

C, D, E = (Member(sid=name, incarnation="i1") for name in "cde")
GROUP = (3, 0, 1)


def test_the_sum_is_sent_once_it_is_there() -> None:
    sums: TiedSums[str] = TiedSums()
    assert sums.ordered(GROUP, [(2, (C, D)), (3, (E,))]) == []
    assert sums.reduced({2: "of 2"}) == [(C, "of 2"), (D, "of 2")]


def test_who_joins_a_tied_stage_while_this_one_reduces_gets_the_sum_too() -> None:
    sums: TiedSums[str] = TiedSums()
    sums.ordered(GROUP, [(2, (C, D))])
    assert sums.ordered(GROUP, [(2, (D, E))]) == []
    assert {receiver for receiver, _ in sums.reduced({2: "sum"})} >= {D, E}


def test_a_repeated_order_sends_to_new_members_alone() -> None:
    sums: TiedSums[str] = TiedSums()
    sums.ordered(GROUP, [(2, (C, D))])
    sums.reduced({2: "sum"})
    assert sums.ordered(GROUP, [(2, (D, E))]) == [(E, "sum")]
    assert sums.ordered(GROUP, [(2, (C, D))]) == []


def test_what_came_outlives_the_group_and_what_was_reduced_does_not() -> None:
    sums: TiedSums[str] = TiedSums()
    sums.ordered(GROUP, [(2, (C, D))])
    sums.reduced({2: "sum of both"})
    sums.arrived(3, 0, 2, "theirs")
    assert sums.ordered((3, 0, 2), [(2, (C, D))]) == []
    assert sums.of(3, 0, [2]) == {2: "theirs"}
    assert sums.of(3, 1, [2]) is None
    assert sums.of(3, 0, [2, 4]) is None
    sums.clear()
    assert sums.of(3, 0, [2]) is None
