"""Draft §4.5(2): units with metadata, edges with bytes, constraints; §4.4(1): the first policy."""

from __future__ import annotations

from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.planning.task_graph import first_policy, plan, window
from schemas.job import JobSpec
from schemas.task_graph import LayerProfile, ModelTopology, UnitKind
from tests.unit.entities.orchestrator.planning.test_placement import node


def spec(stages: int = 2, replicas: int = 2) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"factory": "workers.models.gpt:byte_gpt"},
            "training": {"steps": 2},
            "parallel": {"stages": stages, "replicas": replicas},
        }
    )


def topology(layers: int = 6) -> ModelTopology:
    return ModelTopology(
        job="j1",
        cluster="a",
        node="n",
        layers=tuple(
            LayerProfile(
                index=index,
                name=f"l{index}",
                kind="Block",
                parameters=100,
                parameter_bytes=400,
                forward_ms=1,
                backward_ms=2,
                activation_bytes=1000,
                output=(),
                output_bytes=64,
            )
            for index in range(layers)
        ),
        parameters=600,
        input_bytes=512,
        data_tokens=10_000,
        code_digest="d",
    )


def test_units_edges_and_constraints() -> None:
    graph = plan("j1", spec(), topology(), [node("a", "n", 4), node("b", "n", 4)])
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
    graph = plan("j1", spec(), topology(), [node("a", "n", 4), node("b", "n", 4)])
    assert not isinstance(graph, NoRoom)
    policy = first_policy("j1", spec(), graph, "gateway-a", 7)
    assert policy.revision == 7
    assert policy.algorithm == "expected-completion"
    assert policy.clusters == ("a", "b")
    assert policy.stages[1].weights == {"j1-s1-r0": 1.0, "j1-s1-r1": 1.0}
    assert [stage.window for stage in policy.stages] == [window(2, 0, 2, 2), window(2, 1, 2, 2)]


def test_windows_keep_a_pipeline_full_and_are_never_zero() -> None:
    assert [window(4, stage, 1, 1) for stage in range(4)] == [8, 6, 4, 2]
    assert [window(2, 0, 1, 4), window(2, 1, 4, 4)] == [6, 1], "unequal replicas need some more"
    assert window(1, 0, 8, 8) == 1


def test_no_room_is_passed_on() -> None:
    refused = plan("j1", spec(), topology(), [node("a", "n", 1)])
    assert isinstance(refused, NoRoom)


def test_ties_that_the_analysis_found_reach_the_cut() -> None:
    tied = topology().model_copy(update={"tied": ((0, 3),)})
    graph = plan("j1", spec(), tied, [node("a", "n", 4), node("b", "n", 4)])
    assert not isinstance(graph, NoRoom)
    assert [(unit.first_layer, unit.last_layer) for unit in graph.stage(0)] == [(0, 4), (0, 4)]
