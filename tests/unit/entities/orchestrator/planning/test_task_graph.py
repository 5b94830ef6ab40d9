"""Draft §4.5(2): units with metadata, edges with bytes, constraints; §4.4(1): the first policy."""

from __future__ import annotations

from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.planning.task_graph import first_policy, plan
from entities.planner.windows import window
from schemas.quota import asked_for, slots_of
from schemas.registry import TensorSchema
from schemas.task_graph import UnitKind
from tests.builders import jobs
from tests.builders.graphs import node, topology
from tests.builders.jobs import spec

SPEC = spec(parallel={"stages": 2, "replicas": 2})


def test_units_edges_and_constraints() -> None:
    graph = plan("j1", SPEC, topology(), [node("a", "n", 4), node("b", "n", 4)])
    assert not isinstance(graph, NoRoom)
    stages = [unit for unit in graph.units if unit.kind is UnitKind.STAGE]
    assert [(unit.sid, unit.first_layer, unit.last_layer) for unit in stages] == [
        ("j1-s0-r0", 0, 3),
        ("j1-s0-r1", 0, 3),
        ("j1-s1-r0", 3, 6),
        ("j1-s1-r1", 3, 6),
    ]
    assert [(edge.upstream, edge.downstream, edge.bytes_per_microbatch) for edge in graph.edges] == [
        (-1, 0, 512),
        (0, 1, 64),
    ]
    assert {constraint.kind for constraint in graph.constraints} == {"spread", "order"}
    assert len(graph.placements) == len(graph.units)
    assert stages[0].requirements.cost_ms == 9


def test_the_first_policy_names_every_instance_and_a_window() -> None:
    graph = plan("j1", SPEC, topology(), [node("a", "n", 4), node("b", "n", 4)])
    assert not isinstance(graph, NoRoom)
    policy = first_policy("j1", SPEC, graph, "gateway-a", 7)
    assert policy.revision == 7
    assert policy.algorithm == "expected-completion"
    assert policy.clusters == ("a", "b")
    assert policy.stages[1].weights == {"j1-s1-r0": 1.0, "j1-s1-r1": 1.0}
    assert [stage.window for stage in policy.stages] == [window((2, 2), 0, 2), window((2, 2), 1, 2)]


def test_windows_keep_a_pipeline_full_and_are_never_zero() -> None:
    assert [window((1,) * 4, stage, 1) for stage in range(4)] == [8, 6, 4, 2]
    assert [window((4, 4), 0, 1), window((4, 4), 1, 4)] == [6, 1], "unequal replicas need some more"
    assert [window((1, 3), 0, 1), window((1, 3), 1, 1)] == [8, 2], "one feeds three, each with two at once"
    assert window((8,), 0, 8) == 1


def test_functions_of_preprocessing_come_before_stage_0_with_their_schemas() -> None:
    chain = [
        {"name": "read", "function": "users:read", "replicas": 2},
        {"name": "noise", "function": "users:noise", "replicas": 3},
    ]
    text, number, row = (
        (TensorSchema(name=name, shape=(), dtype=dtype),)
        for name, dtype in (("text", "text"), ("number", "int64"), ("inputs", "float32"))
    )
    job = spec(parallel={"stages": 2}, data={"preprocess": chain})
    found = topology().model_copy(update={"records": (text, number), "batch": row})
    graph = plan("j1", job, found, [node("a", "n", 2), node("b", "n", 2)])
    assert not isinstance(graph, NoRoom)
    making = [unit for unit in graph.units if unit.is_data]
    assert [(unit.sid, unit.stage, unit.part) for unit in making] == [
        ("j1-data-r0", -3, "data"),
        ("j1-read-r0", -2, "preprocess/read"),
        ("j1-read-r1", -2, "preprocess/read"),
        *((f"j1-noise-r{replica}", -1, "preprocess/noise") for replica in range(3)),
    ]
    boundaries = [(unit.input_schema, unit.output_schema) for unit in (making[0], making[1], making[3])]
    assert boundaries == [((), text), (text, number), (number, row)]
    assert [(edge.upstream, edge.downstream) for edge in graph.edges] == [(-3, -2), (-2, -1), (-1, 0), (0, 1)]
    places = {place.sid: (place.cluster, place.slot) for place in graph.placements}
    assert [places[unit.sid] for unit in making[3:]] == [("a", -1), ("b", -1), ("a", -1)]
    assert all(place.slot >= 0 for place in graph.placements if place.sid.startswith("j1-s"))
    policy = first_policy("j1", job, graph, "gateway-a", 1)
    assert [row.stage for row in policy.stages] == [0, 1, -3, -2], "gateways choose among those of stage -1"
    assert set(policy.stages[-1].weights) == {"j1-read-r0", "j1-read-r1"}
    assert asked_for(job).slots == slots_of(jobs.job(spec=job, graph=graph)) == 7
    many = spec(data={"preprocess": [chain[0] | {"replicas": 5}]})
    refused = plan("j1", many, found, [node("a", "n", 4)])
    assert isinstance(refused, NoRoom)
    assert "at most one instance for each slot of the nodes, here 4" in refused.reason


def test_no_room_is_passed_on() -> None:
    refused = plan("j1", SPEC, topology(), [node("a", "n", 1)])
    assert isinstance(refused, NoRoom)


def test_ties_that_the_analysis_found_reach_the_cut() -> None:
    tied = topology().model_copy(update={"tied": ((0, 3),)})
    graph = plan("j1", SPEC, tied, [node("a", "n", 4), node("b", "n", 4)])
    assert not isinstance(graph, NoRoom)
    assert [(unit.first_layer, unit.last_layer) for unit in graph.stage(0)] == [(0, 4), (0, 4)]
