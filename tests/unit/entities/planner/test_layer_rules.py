"""What users say of layers: kept by every plan, or refused in a line that names who contradicts whom."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from entities.planner.constraints import broken_by
from entities.planner.layer_rules import CLUSTER, MEMORY, NODE, least_stages, with_rules
from entities.planner.plan_at_once import plan_at_once
from entities.planner.plan_request import (
    LayerRule,
    NoPlan,
    PlanAnswer,
    PlanLayer,
    PlanRequest,
    PlanSlot,
    RuleKind,
    RuleScope,
)
from entities.planner.search.plan_search import search_plan

GIB = 2**30
NAMES = ("embed", "block-0", "block-1", "block-2", "block-3", "head-a", "head-b", "head-c")


def request(*rules: LayerRule, **changes: Any) -> PlanRequest:
    """Eight layers on eight slots: four nodes of two, in two clusters; the last node has site=lab."""
    asked = PlanRequest(
        layers=tuple(PlanLayer(name, 1.0 + at % 3, 1e8, 1e6, 1e6, 1e5) for at, name in enumerate(NAMES)),
        slots=tuple(
            PlanSlot(
                f"node-{at // 2}",
                f"cluster-{at // 4}",
                at % 2,
                8 * GIB,
                labels=tuple(
                    sorted(
                        [
                            f"{NODE}node-{at // 2}",
                            f"{CLUSTER}cluster-{at // 4}",
                            f"{MEMORY}{8 * GIB}",
                            *(["site=lab"] if at > 5 else []),
                        ]
                    )
                ),
            )
            for at in range(8)
        ),
        clusters=("cluster-0", "cluster-1"),
        microbatches=16,
        stages=2,
        replicas=(2, 2),
    )
    return with_rules(replace(asked, **changes), rules)


def pin(label: str, *layers: int, **changes: Any) -> LayerRule:
    return replace(LayerRule(kind="pin", groups=(layers,), label=label, name=f"pin {label}"), **changes)


def rule(kind: RuleKind, *groups: Sequence[int], scope: RuleScope = "node", hard: bool = True) -> LayerRule:
    return LayerRule(
        kind=kind,
        groups=tuple(map(tuple, groups)),
        scope=scope,
        hard=hard,
        name=f"the {kind}",
    )


def nodes_of(asked: PlanRequest, answer: PlanAnswer, layer: int) -> set[str]:
    stage = next(at for at, (first, last) in enumerate(answer.cuts) if first <= layer < last)
    return {asked.slots[place.slot].node for place in answer.places if place.stage == stage}


def test_pinned_layers_run_only_where_the_label_is() -> None:
    asked = request(pin("site=lab", 0), replicas=(2, 3))
    for answer in (search_plan(asked), plan_at_once(asked)):
        assert nodes_of(asked, answer, 0) == {"node-3"}
        assert "node-3" not in nodes_of(asked, answer, 7)


def test_units_that_change_between_equal_slots_keep_their_forecast() -> None:
    asked = request(pin("site=lab", 0), rule("spread", range(8), hard=False), replicas=(2, 2))
    assert "where constraints let them be" not in search_plan(asked).reason


def test_a_pin_to_a_node_to_a_cluster_and_by_memory() -> None:
    for label, nodes in ((f"{NODE}node-1", {"node-1"}), (f"{CLUSTER}cluster-1", {"node-2", "node-3"})):
        asked = request(pin(label, 7))
        assert nodes_of(asked, search_plan(asked), 7) <= nodes
    asked = request(pin(f"{MEMORY}{8 * GIB}", 7))
    search_plan(asked)
    with pytest.raises(
        NoPlan, match=r"wants 9\.5 GiB for head-c, the largest slot has 8 GiB \(1\.5 GiB too little\)"
    ):
        request(pin(f"{MEMORY}{int(9.5 * GIB)}", 7))


def test_a_stage_has_no_layers_that_are_apart_and_all_that_are_together() -> None:
    units = request(rule("apart", range(5), [5], [6], [7], scope="stage"), stages=4, replicas=(2, 1, 1, 1))
    for answer in (search_plan(units), plan_at_once(units)):
        assert answer.cuts == ((0, 5), (5, 6), (6, 7), (7, 8))
    tied = request(rule("together", [1, 6], scope="stage"), stages=3, replicas=(1, 1, 1))
    for answer in (search_plan(tied), plan_at_once(tied)):
        assert answer.cuts == ((0, 1), (1, 7), (7, 8))


def test_places_apart_together_and_spread() -> None:
    apart = request(rule("apart", [0], [7], scope="cluster"))
    answer = search_plan(apart)
    clusters = [{node in ("node-2", "node-3") for node in nodes_of(apart, answer, at)} for at in (0, 7)]
    assert clusters in ([{True}, {False}], [{False}, {True}])
    together = request(rule("together", [0, 7], scope="cluster"))
    answer = search_plan(together)
    assert len({together.slots[place.slot].cluster for place in answer.places}) == 1
    spread = request(rule("spread", range(8)))
    answer = search_plan(spread)
    assert len(nodes_of(spread, answer, 0)) == len(nodes_of(spread, answer, 7)) == 2
    with pytest.raises(NoPlan, match=r"the spread can't be kept on the 8 free slots"):
        search_plan(request(rule("spread", range(8), scope="cluster"), replicas=(3, 1)))


def test_nodes_of_one_name_in_two_clusters_and_slots_of_unequal_speed() -> None:
    """As `dmsc up` makes them: node vm in each of two clusters, a slow and a fast slot each."""
    slots = tuple(
        PlanSlot(
            f"{cluster}-vm",
            cluster,
            at,
            8 * GIB,
            speed,
            (f"{CLUSTER}b",) if cluster == "b" else ("trust=high",),
            "vm",
        )
        for cluster in ("a", "b")
        for at, speed in enumerate((1.0, 3.0))
    )
    rules = (
        rule("apart", range(5), [5, 6], [7], scope="stage"),
        pin("trust=high", 0),
        pin(f"{CLUSTER}b", 7),
        rule("apart", [0], [5], scope="cluster"),
    )
    asked = request(*rules, slots=slots, clusters=("a", "b"), stages=3, replicas=(1, 1, 1))
    answer = search_plan(asked)
    assert [slots[place.slot].cluster for place in answer.places] == ["a", "b", "b"]
    speeds = [slots[place.slot].speed for place in answer.places]
    work = [sum(layer.work_ms for layer in asked.layers[first:last]) for first, last in answer.cuts]
    slowest = max(16 * own / speed for own, speed in zip(work, speeds, strict=True))
    assert answer.forecast.bottleneck_ms == pytest.approx(slowest, rel=0.1)


def test_a_preferred_one_is_kept_where_it_can_be() -> None:
    asked = request(rule("apart", [0], [1], scope="stage", hard=False), rule("order", [7], [0], hard=False))
    assert search_plan(asked).cuts[0] == (0, 1)
    assert search_plan(asked).reason.endswith("not kept: the order")
    lonely = request(rule("apart", [0], [1], scope="stage", hard=False), stages=1, replicas=(2,))
    assert "not kept: the apart" in search_plan(lonely).reason
    elsewhere = request(pin("site=lab", *range(8), hard=False), stages=1, replicas=(2,))
    assert nodes_of(elsewhere, search_plan(elsewhere), 0) == {"node-3"}
    assert request(pin("site=mars", 0, hard=False)).slots


@pytest.mark.parametrize(
    ("rules", "refusal"),
    [
        ([pin("site=moon", 0)], "pin site=moon pins embed to the label site=moon, which no slot has"),
        (
            [pin(f"{NODE}node-9", 0)],
            r"pins embed to node node-9, which has no slot for it \(there are node-0, node-1",
        ),
        (
            [pin(f"{CLUSTER}cluster-0", 0), pin("site=lab", 0)],
            "pin @cluster=cluster-0 and pin site=lab contradict each other: embed wants both",
        ),
        (
            [rule("together", [0, 3], scope="stage"), rule("apart", [1], [2])],
            "the apart and the together contradict each other: block-0 and block-1 would be",
        ),
        (
            [rule("together", [0, 7]), rule("apart", [0], [7], scope="cluster")],
            "the together and the apart contradict each other: layers of 2 groups",
        ),
        (
            [rule("together", [0, 7]), pin(f"{CLUSTER}cluster-0", 0), pin("site=lab", 7)],
            "the together and pin @cluster=cluster-0 contradict each other: no node has slots",
        ),
        (
            [rule("order", [0], [7]), LayerRule(kind="order", groups=((7,), (0,)), name="another")],
            "the order and another contradict each other: embed before head-c before embed",
        ),
        ([rule("order", [1], [2], [1])], "the order has a cycle: block-0 before block-1 before block-0"),
        ([rule("order", [7], [0])], "the order wants head-c before embed, but the model computes embed"),
        (
            [rule("apart", [0], [1], [2], scope="stage")],
            "parallel.stages is 2, but the apart needs 3: set parallel.stages to at least 3",
        ),
        ([rule("apart", [0, 1], [1, 2])], "the apart has block-0 in two groups"),
        (
            [rule("together", range(8), scope="stage")],
            "parallel.stages is 2, but the together leaves 1 parts",
        ),
    ],
)
def test_what_can_not_be_kept_is_said_in_one_line(rules: list[LayerRule], refusal: str) -> None:
    with pytest.raises(NoPlan, match=refusal) as refused:
        request(*rules)
    assert "\n" not in str(refused.value)


def test_the_fewest_stages_are_what_the_parted_layers_allow() -> None:
    parted = request(
        rule("apart", [0], [3], scope="stage"), rule("apart", [2], [5], [7], scope="stage"), stages=None
    )
    assert least_stages(parted) == 3
    with pytest.raises(NoPlan, match="needs 3"):
        request(rule("apart", [0], [3], scope="stage"), rule("apart", [2], [5], [7], scope="stage"))


@pytest.mark.parametrize("seed", range(24))
def test_no_plan_breaks_a_hard_rule(seed: int) -> None:
    print("seed", seed)
    draws = random.Random(seed)
    rules = []
    for _ in range(draws.randint(1, 4)):
        layers = sorted(draws.sample(range(8), draws.randint(2, 4)))
        match draws.choice(("pin", "apart", "together", "spread")):
            case "pin":
                rules.append(pin(draws.choice(("site=lab", f"{NODE}node-1", f"{CLUSTER}cluster-0")), *layers))
            case "spread":
                rules.append(rule("spread", range(8), scope=draws.choice(("node", "cluster"))))
            case kind:
                groups = [[layer] for layer in layers] if kind == "apart" else [layers]
                rules.append(rule(kind, *groups, scope=draws.choice(("stage", "node", "cluster"))))
    stages = draws.choice((None, 2, 3, 4))
    replicas = None if stages is None else tuple(draws.randint(1, 2) for _ in range(stages))
    kept = 0
    for plan in (search_plan, plan_at_once):
        try:
            asked = request(*rules, stages=stages, replicas=replicas, effort=0.1)
            answer = plan(asked)
        except NoPlan:
            continue
        kept += 1
        assert not broken_by(asked, answer.cuts, answer.places)
        assert len({place.slot for place in answer.places}) == len(answer.places)
    print("plans", kept)


def test_many_rules_on_many_layers_cost_no_square() -> None:
    """64 preferred rules on a thousand layers, half of them with a border at most layers: many seconds on the
    leader's loop, were borders looked for among all edges, and each rule tried with all before it."""
    names = tuple(f"layer-{at}" for at in range(1000))
    asked = PlanRequest(
        layers=tuple(PlanLayer(name, 1.0, 1e6, 1e4, 1e4, 1e3) for name in names),
        slots=tuple(PlanSlot(f"node-{at}", "cluster-0", 0) for at in range(8)),
        clusters=("cluster-0",),
        microbatches=16,
    )
    parting = [
        rule("apart", range(at, 1000, 64), range(at + 32, 1000, 64), scope="stage", hard=False)
        for at in range(32)
    ]
    tying = [rule("together", [at * 31, at * 31 + 1], scope="stage", hard=False) for at in range(32)]
    found = with_rules(asked, [*parting, *tying])
    assert found.unkept == ()
    assert len(found.edges) == 1001 - 32
    assert least_stages(found) == 33  # of 32 layers at most, and some edges are gone
    assert max(upper - lower for lower, upper, _ in found.parted) == 32
    answer = plan_at_once(replace(found, stages=33, replicas=(1,) * 33, slots=found.slots * 5))
    assert not broken_by(found, answer.cuts, ())


def test_preferred_rules_count_those_that_were_kept_before() -> None:
    asked = request(
        rule("apart", [0], [1], scope="stage", hard=False),
        rule("together", [0, 1], scope="stage", hard=False),
        rule("together", [2, 3], scope="stage", hard=False),
        rule("apart", [2], [3], scope="stage", hard=False),
    )
    assert asked.unkept == ("the together", "the apart")
    assert 1 in asked.edges
    assert 3 not in asked.edges


def test_units_that_constraints_move_keep_what_the_reason_said() -> None:
    slots = tuple(
        PlanSlot(f"node-{at}", f"cluster-{at // 2}", 0, 8 * GIB, speed)
        for at, speed in enumerate((1.0, 1.0, 3.0, 3.0))
    )
    asked = request(
        rule("apart", [0], [7], scope="cluster"),
        rule("order", [7], [0], hard=False),
        slots=slots,
        replicas=(1, 1),
    )
    answer = search_plan(asked)
    assert "where constraints let them be" in answer.reason
    assert answer.reason.endswith("not kept: the order")
