"""What the planner's bars are measured by: the least step of an order, and cuts in any order."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks.planner_sections.any_order.contraction import contract
from benchmarks.planner_sections.any_order.graph_cut import cut_graph, stage_costs
from benchmarks.planner_sections.any_order.layer_graph import (
    LayerGraph,
    OutputFlow,
    branch_first_order,
    interval_transfers,
    live_bytes,
)
from benchmarks.planner_sections.cuts import request_of_order
from benchmarks.planner_sections.least_step import ChainSteps
from entities.planner.plan_request import NoPlan
from entities.planner.search.plan_search import search_plan


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


@pytest.mark.parametrize("seed", range(4))
def test_the_least_step_is_that_of_all_cuts_and_all_places(seed: int) -> None:
    graph, speeds = drawn(seed), (0.5, 1.0, 2.0)
    request = request_of_order(graph, branch_first_order(graph), speeds)
    steps = ChainSteps(request)
    least = min(
        steps.step_ms(list(itertools.pairwise((0, *edges, graph.count))), order)
        for edges in itertools.combinations(range(1, graph.count), 2)
        for order in itertools.permutations(speeds)
    )
    assert steps.least_ms(speeds) == pytest.approx(least)
    answer = search_plan(request)
    placed = [request.slots[place.slot].speed for place in answer.places]
    assert answer.forecast.step_ms == pytest.approx(steps.step_ms(answer.cuts, placed)), "the same formula"
    assert answer.forecast.step_ms <= least * 1.005


@pytest.mark.parametrize("seed", range(2))
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


@pytest.mark.parametrize("seed", range(2))
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
