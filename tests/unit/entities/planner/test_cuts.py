"""Cuts of chains and graphs, beside all cuts there are."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from entities.planner.plan_request import NoPlan
from entities.planner.search.chain_cut import (
    interval_sums,
    interval_transfers,
    least_bottleneck,
    least_bottlenecks,
    least_sum,
)
from entities.planner.search.contraction import contract
from entities.planner.search.graph_cut import cut_graph, stage_costs
from entities.planner.search.layer_graph import LayerGraph, OutputFlow, branch_first_order, live_bytes


def drawn(seed: int, count: int = 8) -> LayerGraph:
    draws = random.Random(seed)
    flows = []
    for layer in range(count - 1):
        takers = {draws.randrange(layer + 1, count) for _ in range(draws.randint(1, 2))}
        flows.append(OutputFlow(layer, draws.random(), tuple(sorted(takers))))
    flows.append(OutputFlow(count - 1, draws.random(), (draws.randrange(count - 1),)))  # a gradient
    return LayerGraph(
        names=tuple(f"layer-{at}" for at in range(count)),
        work_ms=tuple(draws.random() for _ in range(count)),
        state_bytes=(1.0,) * count,
        activation_bytes=(1.0,) * count,
        edges=tuple((flow.source, taker) for flow in flows[:-1] for taker in flow.consumers),
        flows=tuple(flows),
    )


def all_cuts(count: int, stages: int) -> list[list[tuple[int, int]]]:
    return [
        list(itertools.pairwise((0, *edges, count)))
        for edges in itertools.combinations(range(1, count), stages - 1)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_the_cut_of_a_chain_is_the_best_of_all(seed: int) -> None:
    draws = np.random.default_rng(seed)
    costs = [interval_sums(draws.random(9)) for _ in range(3)]
    costs[1][2:4, :] = np.inf
    bottleneck, cuts = least_bottleneck(costs)
    of_all = [
        max(costs[stage][first, last] for stage, (first, last) in enumerate(cut)) for cut in all_cuts(9, 3)
    ]
    assert bottleneck == pytest.approx(min(of_all))
    assert max(costs[stage][first, last] for stage, (first, last) in enumerate(cuts)) == bottleneck


def test_the_least_sum_keeps_the_bottleneck() -> None:
    draws = np.random.default_rng(3)
    costs = [interval_sums(draws.random(9))] * 3
    weights = [np.where(np.isfinite(costs[0]), draws.random((10, 10)), 0.0) for _ in range(3)]
    bottleneck, _ = least_bottleneck(costs)
    total, _ = least_sum(weights, costs, 1.2 * bottleneck)
    of_all = [
        sum(weights[stage][first, last] for stage, (first, last) in enumerate(cut))
        for cut in all_cuts(9, 3)
        if all(costs[stage][first, last] <= 1.2 * bottleneck for stage, (first, last) in enumerate(cut))
    ]
    assert total == pytest.approx(min(of_all))


def test_more_stages_than_layers_have_no_cut() -> None:
    assert least_bottleneck([interval_sums(np.ones(2))] * 3) == (np.inf, [])


@pytest.mark.parametrize("seed", range(6))
def test_transfers_of_intervals_are_what_crosses_their_edges(seed: int) -> None:
    graph = drawn(seed)
    order = branch_first_order(graph)
    transfers = interval_transfers(graph, order)
    for first, last in itertools.combinations(range(graph.count + 1), 2):
        inside = set(order[first:last])
        expected = 0.0
        for flow in graph.flows:
            if flow.source in inside:
                expected += flow.size * bool(set(flow.consumers) - inside)
            else:
                expected += flow.size * bool(set(flow.consumers) & inside)
        assert transfers[first, last] == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(8))
def test_the_cut_of_a_graph_is_the_best_of_all_assignments(seed: int) -> None:
    graph = drawn(seed)
    cost, assigned = cut_graph(graph, 3)
    assert cost == pytest.approx(max(stage_costs(graph, assigned, 3)))
    assert all(assigned[first] <= assigned[second] for first, second in graph.edges)
    best = min(
        max(stage_costs(graph, stages, 3))
        for stages in itertools.product(range(3), repeat=graph.count)
        if all(stages[first] <= stages[second] for first, second in graph.edges)
    )
    assert cost <= best * 1.005, seed


def test_the_same_graph_gets_the_same_cut() -> None:
    assert cut_graph(drawn(1, 12), 4) == cut_graph(drawn(1, 12), 4)


def test_cycles_and_ties_become_one_layer() -> None:
    graph = LayerGraph(
        names=tuple("abcde"),
        work_ms=(1.0, 2.0, 4.0, 8.0, 16.0),
        state_bytes=(0.0,) * 5,
        activation_bytes=(0.0,) * 5,
        edges=((0, 1), (1, 2), (2, 1), (2, 3), (3, 4)),
        flows=(OutputFlow(0, 1.0, (1, 2)), OutputFlow(1, 1.0, (2,)), OutputFlow(3, 1.0, (4,))),
    )
    with pytest.raises(NoPlan, match="b and c each need the other's output"):
        branch_first_order(graph)
    contracted, members = contract(graph, [(3, 4)])
    assert members == ((0,), (1, 2), (3, 4))
    assert contracted.work_ms == (1.0, 6.0, 24.0)
    assert contracted.flows == (OutputFlow(0, 1.0, (1,)),)
    assert branch_first_order(contracted) == [0, 1, 2]


def test_a_branch_ends_before_the_next_begins() -> None:
    graph = LayerGraph(
        names=tuple("abcdef"),
        work_ms=(1.0,) * 6,
        state_bytes=(0.0,) * 6,
        activation_bytes=(0.0,) * 6,
        edges=((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)),
        flows=(OutputFlow(0, 10.0, (1, 2)), OutputFlow(3, 1.0, (5,))),
    )
    order = branch_first_order(graph)
    assert order == [0, 1, 3, 2, 4, 5]
    assert live_bytes(graph, order).tolist() == [0, 10, 10, 11, 1, 1, 0]


def test_one_pass_finds_the_cut_for_each_number_of_stages() -> None:
    cost = interval_sums(np.random.default_rng(0).random(10))
    found = least_bottlenecks(cost, 5)
    assert [value for value, _ in found] == [least_bottleneck([cost] * count)[0] for count in range(1, 6)]
