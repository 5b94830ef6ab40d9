"""A cut between two nodes, told from a broken link and a sick instance (DESIGN §5 rule 8)."""

from __future__ import annotations

import pytest

from entities.orchestrator.recovery.partition import (
    FailedEdges,
    NodePartition,
    Side,
    avoided,
    choose_side,
)
from schemas.job import NodeCut
from schemas.step import Member
from tests.builders.steps import member

REMEMBERED_S = 60.0

A, B, C = ("a", "n"), ("b", "n"), ("c", "n")


A0, A1, B0, B1 = (member(sid) for sid in ("a0", "a1", "b0", "b1"))
WHERE = {"a": A, "b": B, "c": C}


class Story:
    def __init__(self) -> None:
        self.edges = FailedEdges(REMEMBERED_S)

    def told(
        self, witness: Member, peer: Member, now: float = 0.0, alone: tuple[Member, ...] = ()
    ) -> NodePartition | None:
        here, there = (WHERE[one.sid[0]] for one in (witness, peer))
        return self.edges.silence(witness, here, peer, there, alone, now)


def test_two_pairs_without_a_common_instance_are_a_cut() -> None:
    story = Story()
    assert story.told(A0, B0) is None
    found = story.told(B1, A1)
    assert found is not None
    assert (found.first, found.second) == (A, B)
    assert str(found) == "nodes a/n and b/n do not reach each other (a0–b0, a1–b1)"


def test_one_instance_that_explains_all_is_perhaps_the_sick_one() -> None:
    story = Story()
    assert [story.told(*pair) for pair in ((A0, B0), (A0, B1), (B0, A0), (A0, B0))] == [None] * 4


def test_the_next_incarnation_of_a_peer_is_silent_too() -> None:
    story = Story()
    assert story.told(A0, B0) is None
    assert story.told(A0, member("b0", "2")) is not None


def test_two_that_are_alone_on_their_nodes() -> None:
    story = Story()
    assert story.told(A0, B0, alone=(A0, B0)) is None
    assert story.told(B0, A0, alone=(A0, B0)) is not None
    assert Story().told(A0, B0, alone=(A0,)) is None


def test_silence_on_one_node_is_no_cut() -> None:
    story = Story()
    assert [story.told(*pair) for pair in ((A0, A1), (A1, A0), (A0, B0))] == [None] * 3


def test_edges_of_other_nodes_do_not_add_up() -> None:
    story = Story()
    assert story.told(A0, B0) is None
    assert story.told(A1, member("c0")) is None


def test_edges_are_forgotten() -> None:
    story = Story()
    assert story.told(A0, B0, now=0.0) is None
    assert story.told(A1, B1, now=REMEMBERED_S) is None
    found = story.told(A0, B0, now=REMEMBERED_S)
    assert found is not None
    story.edges.forget(found)
    assert story.told(A0, B0, now=REMEMBERED_S) is None


def side(node: tuple[str, str], instances: int = 2, stages: int = 2, room: bool = True) -> Side:
    return Side(node=node, instances=instances, stages=stages, room=room)


@pytest.mark.parametrize(
    ("one", "other", "keeps", "why"),
    [
        (side(A), side(B), A, "the first name"),
        (side(A), side(B, instances=3), B, "3 instances against 2"),
        (side(A, stages=1), side(B, instances=1), B, "more stages keep their state so"),
        (side(A, instances=9, room=False), side(B, stages=1), B, "only there is room"),
        (side(A, room=False), side(B, room=False), A, "the first name"),
    ],
)
def test_the_side_to_keep(one: Side, other: Side, keeps: tuple[str, str], why: str) -> None:
    for order in ((one, other), (other, one)):
        best, rest, reason = choose_side(*order)
        assert best.node == keeps
        assert rest.node != keeps
        assert why in reason


def test_a_node_is_avoided_while_the_job_is_on_the_other_side_and_the_cut_is_young() -> None:
    cut = NodeCut(kept=A, given_up=B, at=100.0, reason="")
    assert set(avoided([cut], [A, C], 101.0)) == {B}
    assert not avoided([cut], [C], 101.0)
    assert not avoided([cut], [A], 700.0, avoided_s=600.0)
