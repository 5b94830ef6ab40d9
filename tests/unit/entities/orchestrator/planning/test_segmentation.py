"""Draft §4.5(1), §7.2(2): where the model is cut."""

from __future__ import annotations

import itertools
import random

import pytest

from entities.orchestrator.planning.segmentation import segment
from schemas.errors import BadJob
from schemas.task_graph import LayerProfile
from tests.builders import graphs


def layer(index: int, cost_ms: float, output_bytes: int = 0) -> LayerProfile:
    return graphs.layer(index, forward_ms=cost_ms / 3, backward_ms=2 * cost_ms / 3, output_bytes=output_bytes)


def test_cuts_balance_measured_time_not_layer_count() -> None:
    layers = [layer(0, 1), layer(1, 1), layer(2, 1), layer(3, 9)]
    assert segment(layers, [1, 1]) == [(0, 3), (3, 4)]
    assert segment(layers, [1, 1], method="uniform") == [(0, 2), (2, 4)]


def test_a_stage_with_more_replicas_gets_more_layers() -> None:
    layers = [layer(index, 1) for index in range(9)]
    assert segment(layers, [2, 1]) == [(0, 6), (6, 9)]


def test_equal_bottlenecks_prefer_the_smaller_boundary() -> None:
    layers = [layer(0, 1, 100), layer(1, 1, 10), layer(2, 1, 100), layer(3, 3, 0)]
    cuts = segment(layers, [1, 1, 1])
    assert cuts[1] == (2, 3) or cuts[0] == (0, 2)


@pytest.mark.parametrize("seed", range(20))
def test_the_programme_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    count, stages = draw.randint(3, 9), draw.randint(1, 3)
    layers = [layer(index, draw.uniform(0.1, 10)) for index in range(count)]
    replicas = [draw.randint(1, 3) for _ in range(stages)]

    def bottleneck(cuts: list[tuple[int, int]]) -> float:
        return max(
            sum(one.forward_ms + one.backward_ms for one in layers[first:last]) / share
            for (first, last), share in zip(cuts, replicas, strict=True)
        )

    choices = [
        list(itertools.pairwise((0, *inner, count)))
        for inner in itertools.combinations(range(1, count), stages - 1)
    ]
    found = segment(layers, replicas)
    assert bottleneck(found) == pytest.approx(min(bottleneck(cuts) for cuts in choices)), f"seed {seed}"


def test_no_cut_separates_tied_layers_whatever_the_method() -> None:
    layers = [layer(0, 9), layer(1, 1), layer(2, 1), layer(3, 1), layer(4, 1), layer(5, 1)]
    assert segment(layers, [1, 1]) == [(0, 1), (1, 6)]
    assert segment(layers, [1, 1], tied=[(0, 2)]) == [(0, 3), (3, 6)]
    assert segment(layers, [1, 1, 1], method="uniform") == [(0, 2), (2, 4), (4, 6)]
    assert segment(layers, [1, 1, 1], tied=[(1, 2)], method="uniform") == [(0, 1), (1, 4), (4, 6)]
    assert segment(layers, [1, 1, 1], tied=[(0, 3)], method="uniform") == [(0, 4), (4, 5), (5, 6)]


@pytest.mark.parametrize("seed", range(20))
def test_with_ties_the_programme_is_exact_over_what_is_left(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(4, 9)
    layers = [layer(index, draw.uniform(0.1, 10)) for index in range(count)]
    tied = [tuple(sorted(draw.sample(range(count), 2)))]
    stages = draw.randint(1, count - (tied[0][1] - tied[0][0]))
    choices = [
        cuts
        for inner in itertools.combinations(range(1, count), stages - 1)
        if not any(tied[0][0] < edge <= tied[0][1] for edge in inner)
        for cuts in [list(itertools.pairwise((0, *inner, count)))]
    ]

    def bottleneck(cuts: list[tuple[int, int]]) -> float:
        return max(
            sum(one.forward_ms + one.backward_ms for one in layers[first:last]) for first, last in cuts
        )

    for method in ("measured", "uniform"):
        assert segment(layers, [1] * stages, tied=tied, method=method) in choices, f"seed {seed}"
    found = segment(layers, [1] * stages, tied=tied)
    assert bottleneck(found) == pytest.approx(min(map(bottleneck, choices))), f"seed {seed}"


def test_too_many_stages_for_what_ties_leave_is_refused_with_the_remedy() -> None:
    layers = [layer(index, 1) for index in range(4)]
    with pytest.raises(BadJob, match=r"stages is 3.*layer0 and layer2.*leaves 2 .*at most 2, or change"):
        segment(layers, [1, 1, 1], tied=[(0, 2)])


def test_more_stages_than_layers_is_refused_with_the_remedy() -> None:
    with pytest.raises(BadJob, match=r"parallel.stages is 3.* only 2 layers.*at most 2"):
        segment([layer(0, 1), layer(1, 1)], [1, 1, 1])
