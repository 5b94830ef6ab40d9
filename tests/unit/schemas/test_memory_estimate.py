"""Memory of a stage: what is counted, and when a job is refused with what would make it fit."""

from __future__ import annotations

from typing import Any

import pytest

from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.planning.task_graph import plan
from schemas.cluster import NodeStatus
from schemas.memory_estimate import estimate_stage, largest_room, refusal
from schemas.plain_text import shown
from schemas.task_graph import LayerProfile, TaskGraph
from tests.builders.graphs import layer, node, topology
from tests.builders.jobs import spec

GIB = 1 << 30


def large(count: int, activations: int = 0, parameters: int = 1 << 28) -> list[LayerProfile]:
    """Layers of 1 GiB of weights each."""
    sizes = {"parameters": parameters, "parameter_bytes": 4 * parameters, "activation_bytes": activations}
    return [layer(index, **sizes) for index in range(count)]


def with_memory(nodes: list[NodeStatus], each: int) -> list[NodeStatus]:
    return [
        status.model_copy(
            update={"slots": tuple(s.model_copy(update={"memory_bytes": each}) for s in status.slots)}
        )
        for status in nodes
    ]


def test_the_parts_of_an_adamw_stage() -> None:
    one = estimate_stage(large(2, activations=GIB), spec(), in_flight=4)
    two = estimate_stage(large(2, activations=GIB), spec(), in_flight=4, replicas=2)
    assert (one.weights, one.optimizer, one.sums, one.gradients) == (2 * GIB, 4 * GIB, 4 * GIB, 2 * GIB)
    assert two.sums == one.sums * 18 // 8, "the parts that are exchanged"
    assert (one.activations, one.state, one.least) == (8 * GIB, 12 * GIB, 14 * GIB)
    floats = spec(training={"steps": 1, "exact_accumulation": False})
    assert estimate_stage(large(2), floats, in_flight=1).sums == 2 * GIB
    assert estimate_stage(large(2), spec(), in_flight=1, optimizer_bytes_per_parameter=0).optimizer == 0
    assert one.parts().startswith("activations 8 GiB")


def test_what_is_not_trained_has_no_sum_and_what_is_shared_is_there_once() -> None:
    size = 1 << 28
    frozen = [each.model_copy(update={"frozen": size}) for each in large(2)]
    adapted = estimate_stage([*frozen, *large(1, parameters=1 << 20)], spec(), in_flight=1)
    alone = estimate_stage(large(1, parameters=1 << 20), spec(), in_flight=1)
    assert adapted.state - alone.state == 2 * GIB, "their weights alone"
    tied = [each.model_copy(update={"shared": {"embed": size}}) for each in large(2)]
    one, both = estimate_stage(tied[1:], spec(), in_flight=1), estimate_stage(tied, spec(), in_flight=1)
    assert (both.weights, both.optimizer, both.sums) == (one.weights, one.optimizer, one.sums)
    assert both.gradients == 2 * one.gradients


def test_half_precision_halves_the_weights_and_int8_quarters_what_is_frozen() -> None:
    size = 1 << 28
    sizes = {"parameters": size, "parameter_bytes": 2 * size}
    half = spec(model={"factory": "models:build", "dtype": "bfloat16"})
    one = estimate_stage([layer(0, **sizes)], half, in_flight=1, optimizer_bytes_per_parameter=12)
    assert (one.weights, one.optimizer, one.sums, one.gradients) == (GIB // 2, 3 * GIB, 2 * GIB, 3 * GIB // 2)
    tied = [layer(index, **sizes, shared={"embed": size}) for index in range(2)]
    assert estimate_stage(tied, half, in_flight=1).weights == one.weights
    base = [layer(0, parameters=size, parameter_bytes=size, frozen=size)]
    assert estimate_stage(base, spec(), in_flight=1).state == GIB // 4


def test_room_is_that_of_a_device_and_unknown_room_refuses_nothing() -> None:
    assert largest_room(with_memory([node(slots=4)], GIB)) == 4 * GIB
    cards = node(devices=("cuda:0", "cuda:0", "cuda:1"))
    assert largest_room(with_memory([cards], GIB)) == 2 * GIB
    assert largest_room([node()]) == largest_room([]) == 0
    assert refusal(0, estimate_stage(large(9), spec(), in_flight=1), 0, large(9), spec()) == ""


@pytest.mark.parametrize(
    ("layers", "room", "samples", "remedy"),
    [
        (large(8), 16 * GIB, 1, "set parallel.stages to 5"),
        (large(1, activations=24 * GIB), 16 * GIB, 8, "set training.microbatch_samples to 2, with more"),
        (
            [each.model_copy(update={"input_bytes": GIB // 8}) for each in large(4, activations=6 * GIB)],
            40 * GIB,
            1,
            "set training.recompute to auto, which keeps what layers read",
        ),
        (
            [each.model_copy(update={"frozen": 1 << 28}) for each in large(8)],
            5 * GIB,
            1,
            "set model.quantize to int8, which keeps frozen weights",
        ),
        (large(1), 4 * GIB, 1, "join a node with 9.9 GiB, or make its largest layer several"),
    ],
)
def test_a_refusal_says_what_would_make_it_fit(
    layers: list[LayerProfile], room: int, samples: int, remedy: str
) -> None:
    job = spec(training={"steps": 1, "microbatch_samples": samples})
    text = refusal(0, estimate_stage(layers, job, in_flight=1), room, layers, job)
    assert remedy in text
    assert text.startswith(
        f"stage 0 needs at least {shown(estimate_stage(layers, job, in_flight=1).least)} ("
    )


def planned(nodes: list[NodeStatus], **parallel: Any) -> TaskGraph | NoRoom:
    return plan("j", spec(parallel=parallel), topology(*large(8)), nodes)


def test_a_plan_refuses_what_fits_no_device_and_says_that_it_never_will() -> None:
    nodes = with_memory([node(name="n1", slots=8), node(name="n2", slots=8)], 2 * GIB)
    refused = planned(nodes)
    assert isinstance(refused, NoRoom)
    assert refused.never
    assert "set parallel.stages to " in refused.reason
    beyond_a_slot = planned(nodes, stages=8)  # of 6 GiB each: a device would have room for two, not for eight
    assert isinstance(beyond_a_slot, NoRoom)
    assert "the largest slot has 2 GiB (4 GiB too little)" in beyond_a_slot.reason
    assert isinstance(planned(with_memory(nodes, 8 * GIB), stages=8), TaskGraph)
    assert isinstance(planned([node(slots=8)]), TaskGraph), "memory that is not known refuses nothing"


def test_a_service_needs_its_weights_its_cache_and_one_wave() -> None:
    served = spec(serve={"service": "chat", "cache_mib": 1024})
    needs = estimate_stage(large(2), served, in_flight=4, replicas=2)
    assert (needs.weights, needs.cache, needs.optimizer, needs.sums, needs.gradients) == (
        2 * GIB,
        GIB,
        0,
        0,
        0,
    )
    assert needs.least == 3 * GIB + needs.activations
    assert refusal(0, needs, 4 * GIB, large(2), served) == ""
    said = refusal(0, needs, 5 * GIB // 2, large(2), served)
    assert "weights 2 GiB, cache 1 GiB" in said
    assert "lower serve.cache_mib to 51" in said
    assert "parallel.stages to 2" in said
