"""What one message caused: in any order, with repeats told, bounded, drawn as a tree."""

from __future__ import annotations

import itertools

import pytest

from bus import subjects
from bus.tap import causal_tree
from bus.tap.causal_tree import CausalTree, draw, draw_node
from bus.tap.message import TappedMessage
from bus.wire.correlation import correlated
from schemas.errors import Ack
from schemas.names import MESH
from schemas.policy import SetWeights
from schemas.registry import ReleaseJob
from schemas.telemetry import NodeSample
from tests.builders.policies import decision, suggestion
from tests.builders.tapped_messages import answer, arrived, look


def release(name: str, cause: str | None = None, *, at: float = 1.0) -> TappedMessage:
    return look(arrived(subjects.RELEASE_JOB, ReleaseJob(job="j"), name, cause, at=at))


TREE = [
    release("a", at=1.0),
    release("b", "a", at=1.1),
    look(answer(Ack(), "c", "b", at=1.15)),
    release("d", "a", at=1.2),
    release("e", "d", at=1.3),
]
OTHERS = [
    release("x"),
    release("y", "x"),
    look(arrived(subjects.NODE_SAMPLE, NodeSample(cluster="c", node="n"), "z", agent="n")),
]


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::7])
def test_any_order_gives_the_same_tree(order: tuple[int, ...]) -> None:
    tree = CausalTree("a")
    joined = tree.add_all([*OTHERS, *(TREE[index] for index in order)])
    assert [(node.id, node.depth) for node in tree.walk()] == [
        ("a", 0),
        ("b", 1),
        ("c", 2),
        ("d", 1),
        ("e", 2),
    ]
    assert sorted(node.id for node in joined) == ["a", "b", "c", "d", "e"]
    assert len(tree) == 5


def test_it_is_drawn_with_times_and_branches() -> None:
    tree = CausalTree("a")
    tree.add_all(TREE)
    lines = draw(tree)
    assert [line.split("+")[0] for line in lines] == ["", "├─ ", "│  └─ ", "└─ ", "   └─ "]
    assert [line.split()[-1] for line in lines] == ["[a]", "[b]", "[c]", "[d]", "[e]"]
    assert "+150.0 ms" in lines[2]
    assert draw_node(tree, list(tree.walk())[2]).endswith("[c]  because of b")


def test_a_first_message_that_nobody_saw_still_has_effects() -> None:
    tree = CausalTree("a")
    tree.add_all(TREE[1:])
    assert draw(tree)[0] == "a  not seen: before this tap, and kept by no stream"
    assert "+0.0 ms" in draw(tree)[1]
    assert len(tree) == 4


def test_a_part_of_a_tree_can_be_asked_for() -> None:
    tree = CausalTree("d")
    tree.add_all(TREE)
    assert [node.id for node in tree.walk()] == ["d", "e"]


def test_repeats_are_counted_and_history_is_no_repeat() -> None:
    tree = CausalTree("a")
    tree.add_all(TREE[:1], past=True)
    tree.add_all([*TREE, TREE[1], TREE[1]])
    root, child = list(tree.walk())[:2]
    assert (root.repeats, child.repeats) == (0, 2)
    assert draw(tree)[1].endswith("×3")


def test_a_decision_belongs_to_the_suggestion_that_it_is_about() -> None:
    wish = suggestion(SetWeights(stage=0, weights={"a": 1.0}))
    answered = decision("s-1", adopted=True)
    tree = CausalTree("s-1")
    tree.add(look(arrived(subjects.POLICY_DECISION, answered, "d-1", module="m")))
    tree.add(look(arrived(subjects.SUGGESTION, wish, "s-1", owner=MESH, module="m")))
    assert [node.id for node in tree.walk()] == ["s-1", "d-1"]


def test_messages_in_a_circle_end() -> None:
    tree = CausalTree("a")
    tree.add_all([release("a", "b"), release("b", "a"), release("c", "c")])
    assert [node.id for node in tree.walk()] == ["a", "b"]


def test_what_waits_and_what_is_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_tree, "WAITING", 10)
    monkeypatch.setattr(causal_tree, "NODES", 4)
    tree = CausalTree("root")
    tree.add_all(release(f"o{index}", f"nobody{index}") for index in range(100))
    assert len(tree._waiting) == 10
    assert len(tree._by_cause) == 10
    tree.add_all(release(f"n{index}", "root") for index in range(10))
    assert (len(tree), tree.left_out) == (3, 7)


def of(correlation: str, name: str, cause: str | None = None, *, at: float = 1.0) -> TappedMessage:
    with correlated(correlation):
        return release(name, cause, at=at)


def test_the_tree_of_a_correlation_has_all_that_carries_it() -> None:
    tree = CausalTree("c1")
    tree.add_all(
        [of("c1", "a"), of("c1", "b", "a", at=1.1), of("c2", "x"), of("c1", "c", at=1.2), release("y", "b")]
    )
    assert [(node.id, node.depth) for node in tree.walk()] == [
        ("c1", 0),
        ("a", 1),
        ("b", 2),
        ("y", 3),
        ("c", 1),
    ]
    assert draw(tree)[0] == "c1  all that carries this correlation"
    assert tree.gather() == []


def test_effects_of_what_nobody_saw_are_gathered_below_its_place() -> None:
    tree = CausalTree("c1")
    tree.add_all([of("c1", "b", "a"), of("c1", "c", "b"), of("c1", "d", "a", at=2.0), of("c2", "x", "w")])
    assert len(tree) == 0
    assert {node.id for node in tree.gather()} == {"b", "c", "d"}
    assert [(node.id, node.depth) for node in tree.walk()] == [
        ("c1", 0),
        ("a", 1),
        ("b", 2),
        ("c", 3),
        ("d", 2),
    ]
    tree.add_all([of("c1", "o"), of("c1", "a", "o")])  # seen after all: its place moves to its own cause
    assert [(node.id, node.depth) for node in tree.walk()] == [
        ("c1", 0),
        ("o", 1),
        ("a", 2),
        ("b", 3),
        ("c", 4),
        ("d", 3),
    ]
