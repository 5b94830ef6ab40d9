"""Who sends which sum of a tied stage to whom, whatever happens to the stages meanwhile."""

from __future__ import annotations

from collections import Counter

from schemas.step import Member
from workers.stage.tied_sums import TiedSums

A, B, C, D, E = (Member(sid=name, incarnation="i1") for name in "abcde")
GROUP = (3, 0, 1)


def test_each_member_of_another_stage_gets_the_sum_once() -> None:
    for own, others in (((A,), (C, D, E)), ((A, B), (C, D, E)), ((A, B), (C,))):
        sent: Counter[Member] = Counter()
        for member in own:
            sums: TiedSums[str] = TiedSums(member)
            assert sums.ordered(GROUP, own, [(2, others)]) == []
            sent.update(receiver for receiver, what in sums.reduced({2: "sum"}) if what == "sum")
        assert sent == Counter(others)


def test_who_joins_a_tied_stage_while_this_one_reduces_gets_the_sum_too() -> None:
    sums: TiedSums[str] = TiedSums(A)
    sums.ordered(GROUP, (A,), [(2, (C, D))])
    assert sums.ordered(GROUP, (A,), [(2, (D, E))]) == []
    assert {receiver for receiver, _ in sums.reduced({2: "sum"})} >= {D, E}


def test_a_repeated_order_sends_to_new_members_alone() -> None:
    sums: TiedSums[str] = TiedSums(A)
    sums.ordered(GROUP, (A,), [(2, (C, D))])
    sums.reduced({2: "sum"})
    assert sums.ordered(GROUP, (A,), [(2, (D, E))]) == [(E, "sum")]
    assert sums.ordered(GROUP, (A,), [(2, (C, D))]) == []


def test_what_came_outlives_the_group_and_what_was_reduced_does_not() -> None:
    sums: TiedSums[str] = TiedSums(A)
    sums.ordered(GROUP, (A, B), [(2, (C, D))])
    sums.reduced({2: "sum of both"})
    sums.arrived(3, 0, 2, "theirs")
    assert sums.ordered((3, 0, 2), (A,), [(2, (C, D))]) == []
    assert sums.of(3, 0, [2]) == {2: "theirs"}
    assert sums.of(3, 1, [2]) is None
    assert sums.of(3, 0, [2, 4]) is None
    sums.clear()
    assert sums.of(3, 0, [2]) is None
