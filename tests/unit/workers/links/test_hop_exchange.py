"""What both ends of a link work out alone, and the pace of an unanswered notice."""

from __future__ import annotations

import itertools

import pytest
import torch

from schemas.data_plane import TensorMeta
from schemas.errors import BadMessage
from schemas.step import Member
from workers.links.link_config import next_pause
from workers.links.link_table import Pair
from workers.transport.pinned_buffers import describe, dtype_of, landing, size_bytes, to_host

ONE, TWO, TWO_AGAIN = (
    Member(sid="one", incarnation="a"),
    Member(sid="two", incarnation="a"),
    Member(sid="two", incarnation="b"),
)


def test_both_ends_find_the_same_name_and_different_ranks() -> None:
    for left, right in itertools.permutations((ONE, TWO, TWO_AGAIN), 2):
        here, there = Pair.of(left, right), Pair.of(right, left)
        assert here.name == there.name
        assert {here.rank, there.rank} == {0, 1}
        assert here.link(4) == there.link(4)
        assert there.number(here.link(4)) == 4


def test_another_incarnation_is_another_pair() -> None:
    assert Pair.of(ONE, TWO).name != Pair.of(ONE, TWO_AGAIN).name
    assert Pair.of(ONE, TWO).number(Pair.of(ONE, TWO_AGAIN).link(1)) is None


@pytest.mark.parametrize(
    "name", ["", "nonsense", "one.a+two.a", "one.a+two.a+", "one.a+two.a+x", "one.a+two.a+-1"]
)
def test_names_that_are_none(name: str) -> None:
    assert Pair.of(ONE, TWO).number(name) is None


def test_nobody_is_linked_to_itself() -> None:
    with pytest.raises(ValueError, match="no tensor link to itself"):
        Pair.of(ONE, ONE)


def test_notices_are_repeated_with_doubling_pauses_and_soon_after_later() -> None:
    """DESIGN §5 rule 11: 200 ms, backing off to 2 s."""
    pauses = [0.2]
    while len(pauses) < 6:
        pauses.append(next_pause(pauses[-1], None))
    assert pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert next_pause(2.0, "later") == 0.2


def test_tensors_are_described_and_land_as_described() -> None:
    sent = [torch.ones(2, 3, dtype=torch.bfloat16).t(), torch.tensor(True), torch.empty(0, 4)]
    metas = describe(sent)
    assert metas == (
        TensorMeta(shape=(3, 2), dtype="bfloat16"),
        TensorMeta(shape=(), dtype="bool"),
        TensorMeta(shape=(0, 4), dtype="float32"),
    )
    assert size_bytes(metas) == 12 + 1
    assert [(one.shape, one.dtype) for one in landing(metas, torch.device("cpu"))] == [
        (one.shape, one.dtype) for one in sent
    ]
    staged = to_host(sent)
    assert all(one.is_contiguous() and not one.requires_grad for one in staged)
    assert staged[1].data_ptr() == sent[1].data_ptr()  # no copy where none is needed


def test_an_unknown_dtype_is_a_bad_message() -> None:
    for name in ("float12", "nn", "__name__"):
        with pytest.raises(BadMessage, match="unknown dtype"):
            dtype_of(TensorMeta(shape=(1,), dtype=name))
