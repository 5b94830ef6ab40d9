"""Who keeps the copy of a stage that has only one member."""

from __future__ import annotations

from entities.orchestrator.recovery.peer_copies import choose_holders
from schemas.step import Member
from tests.builders.steps import member

A, B, C, D, DATA = (member(sid) for sid in ("a", "b", "c", "d", "data"))


def test_stages_of_one_are_copied_to_each_other_evenly() -> None:
    chosen = choose_holders([[A], [B], [C], [D]], [DATA], nodes={}, present={})
    assert set(chosen) == {A, B, C, D}
    assert len(set(chosen.values())) == 4
    assert all(source != holder for source, holder in chosen.items())


def test_a_stage_with_another_replica_or_a_standby_needs_none() -> None:
    chosen = choose_holders([[A, B], [C]], [DATA], nodes={}, present={})
    assert set(chosen) == {C}
    assert chosen[C] in (A, B)


def test_a_holder_is_on_another_node_if_there_is_one() -> None:
    nodes = {"a": "one", "b": "one", "c": "two"}
    chosen = choose_holders([[A], [B], [C]], [], nodes=nodes, present={})
    assert chosen[A] == chosen[B] == C


def test_the_only_stage_is_copied_to_a_data_instance_and_alone_to_nobody() -> None:
    assert choose_holders([[A]], [DATA], nodes={}, present={}) == {A: DATA}
    assert choose_holders([[A]], [], nodes={}, present={}) == {}
    assert choose_holders([[A], []], [], nodes={}, present={}) == {}


def test_a_holder_stays_while_it_lives() -> None:
    present = {A: D, B: C}
    chosen = choose_holders([[A], [B], [C], [D]], [], nodes={}, present=present)
    assert (chosen[A], chosen[B]) == (D, C)
    again = member("d", "b")
    moved = choose_holders([[A], [B], [C], [again]], [], nodes={}, present=present)
    assert moved[A] in (B, C, again)
    assert moved[B] == C


def test_rather_no_copy_than_one_where_the_state_may_not_be() -> None:
    def may_hold(stage: int, peer: Member) -> bool:
        return stage != 0 or peer == C

    chosen = choose_holders([[A], [B], [C]], [], nodes={}, present={A: B}, may_hold=may_hold)
    assert chosen[A] == C, "it leaves a holder that may not be one"
    assert A not in choose_holders([[A], [B]], [], nodes={}, present={}, may_hold=may_hold)
