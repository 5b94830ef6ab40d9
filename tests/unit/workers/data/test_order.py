"""The order of samples: each exactly once an epoch, the same from wherever it is asked for."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.data_account import BLOCK, account, exact_weights
from schemas.task_graph import DataSource
from tests.builders.samples import data_job
from workers.data.interleaving import Interleaving
from workers.data.order import OrderedSource, SampleOrder
from workers.data.permutation import SMALL, Permutation

SIZES = st.integers(1, 3000)


@given(size=SIZES, key=st.integers(0, 1 << 70))
@settings(max_examples=40, deadline=None)
def test_a_permutation_has_each_number_once(size: int, key: int) -> None:
    places = Permutation(size, key)(np.arange(size, dtype=np.int64))
    assert sorted(places.tolist()) == list(range(size))


def test_one_of_a_trillion_is_found_alone_and_lies_within() -> None:
    large = Permutation(10**12 + 39, "seed", 0)
    asked = np.array([0, 1, 10**12 + 38, 123_456_789_012], dtype=np.int64)
    places = large(asked)
    assert len({*places.tolist()}) == 4
    assert (places >= 0).all()
    assert (places < 10**12 + 39).all()
    assert large(asked[2:3])[0] == places[2]


@pytest.mark.parametrize("size", [4, 5])
def test_all_orders_of_few_are_drawn_alike(size: int) -> None:
    drawn = Counter(tuple(Permutation(size, key)(np.arange(size)).tolist()) for key in range(6000))
    orders = len([*itertools.permutations(range(size))])
    assert len(drawn) == orders
    assert max(drawn.values()) < 1.8 * 6000 / orders


def test_neighbours_do_not_stay_neighbours() -> None:
    places = Permutation(4 * SMALL, 7)(np.arange(4 * SMALL, dtype=np.int64))
    assert (np.abs(np.diff(places)) == 1).sum() < 20
    assert abs(np.corrcoef(np.arange(places.size), places)[0, 1]) < 0.05


def test_the_drawn_order_never_changes() -> None:
    """Frozen: another order would be another job under the same seed."""
    small = SampleOrder(3, "train", [OrderedSource(7)]).draws(0, 9)
    large = SampleOrder(3, "train", [OrderedSource(10**6)]).draws(10**6 - 2, 4)
    mixed = SampleOrder(3, "train", [OrderedSource(5, weight=Fraction(w)) for w in (3, 1)]).draws(10, 12)
    blocks = SampleOrder(3, "train", [OrderedSource(40, blocks=(4,) * 10)]).draws(0, 6)
    found = {
        "small": small.indices.tolist(),
        "large": large.indices.tolist(),
        "mixed": list(zip(mixed.sources.tolist(), mixed.indices.tolist(), strict=True)),
        "blocks": blocks.indices.tolist(),
    }
    assert found == FROZEN


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=5),
    weights=st.lists(st.sampled_from([0.1, 0.25, 1.0, 3.0, 0.333]), min_size=5, max_size=5),
    seed=st.integers(0, 1 << 62),
    samples=st.integers(1, 12),
    cuts=st.lists(st.integers(1, 900), min_size=1, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_each_sample_is_once_an_epoch_and_any_resume_goes_on_in_the_same_order(
    sizes: list[int], weights: list[float], seed: int, samples: int, cuts: list[int]
) -> None:
    exact = exact_weights(weights[: len(sizes)])
    order = SampleOrder(
        seed, "train", [OrderedSource(size, weight=share) for size, share in zip(sizes, exact, strict=True)]
    )
    total = sum(cuts) * samples
    whole = order.draws(0, total)
    parts, at = [], 0
    for cut in cuts:  # whatever the pieces are in which it is asked for
        parts.append(order.draws(at, cut * samples))
        at += cut * samples
    for name in ("sources", "epochs", "indices"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert (joined == getattr(whole, name)).all()
    assert np.bincount(whole.sources, minlength=len(sizes)).tolist() == order.counts(total)
    for source, size in enumerate(sizes):
        mine = whole.sources == source
        epochs = whole.epochs[mine]
        assert (np.diff(epochs) >= 0).all()  # no epoch begins before the one before is over
        for epoch in range(int(epochs.max(initial=0))):
            assert sorted(whole.indices[mine][epochs == epoch].tolist()) == list(range(size))


@given(
    blocks=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_blocks_are_read_a_few_at_a_time_and_each_sample_once(
    blocks: list[int], epoch: int, seed: int
) -> None:
    size = sum(blocks)
    order = SampleOrder(seed, "train", [OrderedSource(size, blocks=tuple(blocks))])
    indices = order.draws(epoch * size, size).indices
    assert sorted(indices.tolist()) == list(range(size))
    block_of = np.repeat(np.arange(len(blocks)), blocks)[indices]
    seen: list[int] = [*dict.fromkeys(block_of.tolist())]
    for number, block in enumerate(seen):  # of eight blocks each: no block of the next eight comes before
        places = np.flatnonzero(block_of == block)
        group = {*seen[number // 8 * 8 : number // 8 * 8 + 8]}
        assert {*block_of[places.min() : places.max() + 1].tolist()} <= group


def test_epochs_differ_and_so_do_splits_and_seeds() -> None:
    orders = [
        SampleOrder(seed, split, [OrderedSource(50)])
        for seed, split in ((1, "train"), (2, "train"), (1, "v"))
    ]
    firsts = [tuple(order.draws(0, 50).indices.tolist()) for order in orders]
    assert len({*firsts, tuple(orders[0].draws(50, 50).indices.tolist())}) == 4


def test_drop_leaves_out_what_fills_no_step_and_others_each_time() -> None:
    order = SampleOrder(5, "train", [OrderedSource(50)], whole_steps=8)
    epochs = [{*order.draws(48 * epoch, 48).indices.tolist()} for epoch in range(6)]
    assert all(len(epoch) == 48 for epoch in epochs)
    assert len({frozenset(range(50)) - epoch for epoch in epochs}) > 1
    with pytest.raises(ValueError, match="steps of 51"):
        SampleOrder(5, "train", [OrderedSource(50)], whole_steps=51)


def test_in_sequence_samples_come_as_they_lie() -> None:
    order = SampleOrder(5, "train", [OrderedSource(4, shuffled=False)])
    assert order.draws(0, 6).indices.tolist() == [0, 1, 2, 3, 0, 1]
    assert order.sample_at(9) == (0, 2, 1)


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6), draws=st.integers(1, 5000))
@settings(max_examples=40, deadline=None)
def test_each_prefix_keeps_to_the_weights(weights: list[float], draws: int) -> None:
    exact = exact_weights(weights)
    counts = Interleaving(exact, 1).counts(draws)
    assert sum(counts) == draws
    for share, count in zip(exact, counts, strict=True):
        assert abs(count - draws * float(share)) <= BLOCK * 3


def test_weights_are_taken_as_written() -> None:
    assert exact_weights([0.1, 0.2, 0.7]) == [Fraction(1, 10), Fraction(2, 10), Fraction(7, 10)]
    assert exact_weights([1, 3]) == [Fraction(1, 4), Fraction(3, 4)]


FROZEN = {
    "small": [1, 5, 3, 4, 6, 2, 0, 3, 1],
    "large": [785592, 700408, 351835, 524432],
    "mixed": [(0, 4), (0, 0), (1, 1), (0, 4), (0, 1), (0, 2), (0, 0), (0, 3), (0, 1), (0, 3), (1, 0), (0, 2)],
    "blocks": [15, 25, 37, 27, 26, 4],
}


@given(
    weights=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    step=st.integers(0, 1 << 40),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_the_account_counts_without_arrays_what_the_order_gives(
    weights: list[int], step: int, seed: int
) -> None:
    """What checkpoints and `dmsc runs show` tell of the data that was seen, to the sample."""
    mixture = [{"kind": "tokens", "source": f"{n}.npy", "weight": weight} for n, weight in enumerate(weights)]
    job = data_job({"mixture": mixture, "kind": "tokens", "order": "shuffled"}, seed=seed)
    sources = [OrderedSource(10 + n, weight=weight) for n, weight in enumerate(exact_weights(weights))]
    order = SampleOrder(seed, "train", sources)
    found = account(
        job, [DataSource(name=f"s{n}", epoch_samples=10 + n) for n in range(len(weights))], step, 3
    )
    samples = step * job.training.microbatches * job.training.microbatch_samples
    assert [source.samples for source in found.sources] == order.counts(samples)
    assert sum(source.samples for source in found.sources) == samples
    assert found.sources[0].epochs == found.sources[0].samples / 10
    assert found.line().endswith("3 unreadable replaced")
