"""The section `plan` of a job: names become layers and slots, and what is not there is said in one line."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from entities.orchestrator.planning.kept_apart import may_lie, nodes_for, unfit_for
from entities.orchestrator.planning.placement import NoRoom, place
from entities.orchestrator.planning.plan_rules import matching, model_digest, open_to
from entities.orchestrator.planning.shape_choice import shape_request
from entities.orchestrator.planning.task_graph import plan
from entities.orchestrator.planning.task_heads import task_units
from schemas.cluster import NodeStatus
from schemas.errors import BadJob
from schemas.job import JobSpec
from schemas.job_file.plan import PlanSpec
from schemas.task_graph import LayerEdge, ModelTopology, TaskGraph, UnitKind
from tests.builders import jobs
from tests.builders.graphs import layer, node, topology

NAMES = ("number", "backbone.0", "heads.a.0", "heads.a.2", "heads.b.0", "heads.b.2", "heads.c.0", "heads.c.2")
BRANCHES = ((-1, 0), (-1, 7), (0, 1), (1, 2), (1, 4), (1, 6), (2, 3), (3, 7), (4, 5), (5, 7), (6, 7))
"""As recorded of `examples/task-groups`: the last layer joins the heads."""


def model(
    names: tuple[str, ...] = NAMES, wires: tuple[tuple[int, int], ...] = BRANCHES, bare: tuple[int, ...] = ()
) -> ModelTopology:
    layers = [
        layer(at, name=name, parameters=0 if at in bare else 100, parameter_bytes=0 if at in bare else 400)
        for at, name in enumerate(names)
    ]
    edges = tuple(LayerEdge(upstream=low, downstream=high, bytes=64) for low, high in wires)
    return topology(*layers, edges=edges)


def spec(stages: int = 2, replicas: Any = 1, **plan_: Any) -> JobSpec:
    return jobs.spec(parallel={"stages": stages, "replicas": replicas}, plan=plan_)


def labelled(name: str, cluster: str = "a", slots: int = 2, **labels: str) -> NodeStatus:
    found = node(cluster, name, slots)
    return found.model_copy(
        update={"slots": tuple(slot.model_copy(update={"labels": labels}) for slot in found.slots)}
    )


NODES = (labelled("n1", trust="high"), labelled("n2"), labelled("n3", "b"), labelled("n4", "b"))


def planned(
    job: JobSpec, found: ModelTopology | None = None, nodes: tuple[NodeStatus, ...] = NODES
) -> TaskGraph:
    graph = plan("j1", job, found or model(), nodes)
    assert isinstance(graph, TaskGraph), graph
    return graph


def cuts(graph: TaskGraph) -> list[tuple[int, int]]:
    return [
        (unit.first_layer, unit.last_layer)
        for unit in graph.units
        if unit.kind is UnitKind.STAGE and not unit.replica
    ]


def nodes_of(graph: TaskGraph, stage: int) -> set[str]:
    return {graph.placement(unit.sid).node for unit in graph.stage(stage)}


# --- business ---------------------------------------------------------------------------------------------
def test_the_trunk_ends_where_the_heads_part() -> None:
    units = task_units(model())
    assert [(unit.name, unit.layers) for unit in units] == [
        ("trunk", (0, 1)),
        ("heads.a", (2, 3)),
        ("heads.b", (4, 5)),
        ("heads.c", (6, 7)),
    ]
    assert cuts(planned(spec(4, by="business"))) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert cuts(planned(spec(5, by="business")))[2:] == [(2, 4), (4, 6), (6, 8)], (
        "only the trunk is cut further"
    )


def test_heads_of_outputs_that_nothing_joins_and_behind_a_layer_without_weights() -> None:
    apart = model(wires=((-1, 0), (0, 1), (1, 2), (2, 3), (1, 4), (4, 5), (1, 6), (6, 7)))
    assert [unit.layers for unit in task_units(apart)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    skip = ((0, 1), (1, 2), (1, 4), (1, 6), (2, 3), (3, 6), (4, 5), (5, 6), (6, 7))
    assert [unit.layers for unit in task_units(model(wires=skip, bare=(6, 7)))][1:] == [(2, 3), (4, 5, 6, 7)]
    single = model(NAMES[:4], ((0, 1), (1, 2), (1, 3)))
    assert [unit.layers for unit in task_units(single)] == [(0, 1), (2,), (3,)], "heads of a layer each"


def test_a_model_without_heads_or_with_mixed_ones_is_refused() -> None:
    chain = model(wires=tuple((at, at + 1) for at in range(7)))
    with pytest.raises(BadJob, match="several task heads, and all of this one's 8 layers are on the way"):
        planned(spec(2, by="business"), chain)
    mixed = model(wires=((0, 1), (1, 2), (1, 3), (2, 4), (3, 5), (4, 7), (5, 7), (6, 7), (1, 6)))
    with pytest.raises(BadJob, match=r"layers of two task heads alternate: heads\.b\.0 of the head with"):
        planned(spec(4, by="business"), mixed)
    graph = plan("j1", spec(3, by="business"), model(), NODES)
    assert graph == NoRoom(
        "parallel.stages is 3, but plan.by: business needs 4: set parallel.stages to at least 4", never=True
    )


# --- places -----------------------------------------------------------------------------------------------
def test_private_layers_run_only_on_trusted_nodes_and_so_do_their_replacements() -> None:
    graph = planned(spec(3, by="block", privacy={"number": "trust=high", "heads.c": "trust=high"}))
    assert cuts(graph)[0] == (0, 1)
    assert cuts(graph)[2] == (6, 8)
    assert nodes_of(graph, 0) | nodes_of(graph, 2) == {"n1"}
    assert nodes_of(graph, 1) & {"n1"} == set()
    assert graph.stage(0)[0].requirements.labels == ("trust=high",)
    lost = graph.stage(0)[0]
    assert place([lost], NODES[1:]) == NoRoom(
        "j1-s0-r0 is pinned to the label trust=high, and no such slot is free: waiting for one"
    )
    found = place([lost], [NODES[1], labelled("n9", "b", trust="high")])
    assert not isinstance(found, NoRoom)
    assert found[0].node == "n9"
    assert [may_lie(graph, 0, each) for each in (NODES[0], NODES[1], None)] == [True, False, False]
    assert may_lie(graph, 1, NODES[1])
    working = graph.stage(1)[0]
    elsewhere = next(each for each in NODES if each.node == graph.placement(working.sid).node)
    assert unfit_for(graph, 0, working.sid, elsewhere) == "stage 0 is pinned to the label trust=high"
    assert unfit_for(graph, 1, lost.sid, NODES[0]) == ""


def test_later_instances_keep_what_is_apart_and_together() -> None:
    rules = [
        {"kind": "apart", "layers": ["number", "heads.c"], "scope": "cluster"},
        {"kind": "spread", "layers": ["number"], "hard": True},
    ]
    pins = [
        {"kind": "pin", "layers": ["number"], "cluster": "a"},
        {"kind": "pin", "layers": ["heads.c"], "cluster": "b"},
    ]
    graph = planned(spec(2, 2, constraints=[*rules, *pins]))
    assert {graph.placement(unit.sid).cluster for unit in graph.stage(0)} == {"a"}
    assert [rule.kind for rule in graph.constraints if rule.stages] == ["apart", "spread"]
    lost = graph.stage(1)[0]
    others = [each for each in graph.placements if each.sid != lost.sid]
    left = nodes_for(graph, lost, NODES, others)
    assert [each if isinstance(each, str) else each.node for each in left] == ["n3", "n4"]
    assert nodes_for(graph, graph.stage(0)[0], NODES[1:2], others) == "plan.constraints[1] (spread)"
    third = graph.stage(0)[0].model_copy(update={"sid": "j1-s0-r2", "replica": 2})
    assert nodes_for(graph, third, NODES, graph.placements) == "plan.constraints[1] (spread)"


def test_what_is_tabu_is_not_used() -> None:
    tabu = {"nodes": ["n2"], "labels": ["trust=high"]}
    left = open_to(spec(tabu=tabu), NODES)
    assert [(each.node, len(each.slots)) for each in left] == [("n1", 0), ("n3", 2), ("n4", 2)]
    graph = planned(spec(2, 2, tabu=tabu))
    assert nodes_of(graph, 0) | nodes_of(graph, 1) == {"n3", "n4"}
    assert isinstance(plan("j1", spec(2, 3, tabu=tabu), model(), NODES), NoRoom)
    assert cuts(planned(spec(2, tabu={"begin": ["heads.b*", "heads.a", "heads.c"]}))) == [(0, 1), (1, 8)]


def test_the_planners_own_shape_has_the_slots_that_layers_are_pinned_to() -> None:
    """The trusted node is the slowest, and the job may use two slots of eight."""
    fast = tuple(
        each.model_copy(
            update={"slots": tuple(slot.model_copy(update={"speed": {"stage": 3.0}}) for slot in each.slots)}
        )
        for each in NODES[1:]
    )
    parallel = {"stages": "auto", "slots": 2}
    job = jobs.spec(parallel=parallel, plan={"privacy": {"number": "trust=high"}})
    request = shape_request(job, model(), (NODES[0], *fast))
    assert sorted(slot.labels for slot in request.slots) == [(), ("trust=high",)]
    assert sorted(slot.speed for slot in request.slots) == [1.0, 3.0]
    plain = shape_request(jobs.spec(parallel=parallel), model(), (NODES[0], *fast))
    assert [slot.speed for slot in plain.slots] == [3.0, 3.0]


# --- names ------------------------------------------------------------------------------------------------
def test_patterns_name_layers_and_modules() -> None:
    assert matching("heads.a", NAMES, "x") == (2, 3)
    assert matching("heads.*.0", NAMES, "x") == (2, 4, 6)
    with pytest.raises(
        BadJob, match=r"x: no layer matches backbon\.0 \(did you mean backbone\.0\?\): the model has"
    ):
        matching("backbon.0", NAMES, "x")


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"constraints": [{"kind": "pin", "layers": ["tail"], "node": "n1"}]}, "no layer matches tail"),
        ({"shared": [["number", "tial"]]}, r"plan.shared\[0\]: no layer matches tial"),
        ({"tabu": {"begin": ["z"]}}, "plan.tabu.begin: no layer matches z"),
        ({"tabu": {"begin": ["*"]}}, "plan.tabu.begin leaves 1 parts"),
        ({"cuts": ["heads.d"]}, r"another model: no layer is called heads.d \(did you mean heads"),
        (
            {"cuts": ["heads.a.0"], "model": "0" * 16},
            "of another model: of 0000000000000000, and this one is",
        ),
        ({"cuts": ["heads.a.0", "heads.b.0"]}, "makes 3 stages, but parallel.stages is 2"),
        ({"cuts": ["heads.b.0", "heads.a.0"]}, "not in the model's order"),
    ],
)
def test_names_that_nothing_has_are_refused(asked: dict[str, Any], refusal: str) -> None:
    with pytest.raises(BadJob, match=refusal) as refused:
        plan("j1", spec(2, **asked), model(), NODES)
    assert "\n" not in refused.value.text


@pytest.mark.parametrize(
    ("pin", "refusal"),
    [
        ({"kind": "pin", "node": "n7"}, "node n7, which has no slot for it (there are n1, n2, n3, n4)"),
        ({"kind": "pin", "label": "trust=low"}, "the label trust=low, which no slot has"),
    ],
)
def test_pins_to_what_is_not_there_are_refused(pin: dict[str, Any], refusal: str) -> None:
    graph = plan("j1", spec(2, constraints=[pin]), model(), NODES)
    assert isinstance(graph, NoRoom)
    assert graph.never
    assert refusal in graph.reason


def test_a_kept_plan_is_cut_as_it_was() -> None:
    first = planned(spec(3))
    begins = [NAMES[low] for low, _ in cuts(first)[1:]]
    again = planned(spec(3, cuts=begins, model=model_digest(model())))
    assert cuts(again) == cuts(first)
    assert cuts(planned(spec(2, cuts=["heads.c.2"]))) == [(0, 7), (7, 8)]


@pytest.mark.parametrize(
    ("section", "refusal"),
    [
        ({"constraints": [{"kind": "pin"}]}, "a pin needs one of label, node and cluster, here none"),
        ({"constraints": [{"kind": "pin", "node": "a", "cluster": "b"}]}, "here node and cluster"),
        ({"constraints": [{"kind": "spread", "node": "a"}]}, "node is of kind: pin, not of spread"),
        ({"constraints": [{"kind": "memory"}]}, "gib and kind: memory belong together"),
        ({"constraints": [{"kind": "spread", "scope": "stage"}]}, "scope stage says nothing of spread"),
        ({"constraints": [{"kind": "order", "scope": "node", "layers": ["a", "b"]}]}, "it has none"),
        ({"constraints": [{"kind": "apart", "layers": ["a"]}]}, "apart is between at least two entries"),
        ({"by": "block"}, "give privacy"),
        ({"model": "0" * 16}, "give cuts"),
        ({"cuts": ["a"], "by": "business"}, "cuts and by both say where"),
        ({"privacy": {"a": "trust"}}, "privacy"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(section: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValidationError, match=refusal):
        PlanSpec.model_validate(section)
