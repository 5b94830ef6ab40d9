"""What a job leaves to memory is fixed once, from the analysis and the smallest slot."""

from __future__ import annotations

from typing import Any

import pytest

from entities.orchestrator.planning.memory_fit import fewer_slots, fixed_by_memory
from entities.orchestrator.planning.placement import NoRoom
from entities.orchestrator.planning.task_graph import plan
from schemas.checkpoint import spec_digests
from schemas.cluster import NodeStatus
from schemas.job import JobSpec
from tests.builders.graphs import layer, node, topology
from tests.builders.jobs import spec

MIB = 1 << 20


def slots(*memory: int) -> list[NodeStatus]:
    """A node with slots of so much memory."""
    there = node(slots=len(memory))
    sized = [
        slot.model_copy(update={"memory_bytes": each}) for slot, each in zip(there.slots, memory, strict=True)
    ]
    return [there.model_copy(update={"slots": tuple(sized)})]


def job(stages: int = 1, **training: Any) -> JobSpec:
    return spec(training={"steps": 1, **training}, parallel={"stages": stages})


LAYERS = topology(
    *(
        layer(
            index, activation_bytes=10 * MIB, input_bytes=MIB, forward_ms=1.0 + index, name=f"blocks.{index}"
        )
        for index in range(4)
    )
)


@pytest.mark.parametrize(
    ("stages", "memory", "samples", "text"),
    [
        (1, 1 << 40, 128, "too few microbatches"),
        (1, 400 * MIB, 4, "8 would need 7"),
        (2, 400 * MIB, 4, "stage 0 needs"),
        (1, 1, 1, "stage 0 needs"),
        (1, 0, 4, "the memory of some slot is not known"),
    ],
)
def test_a_microbatch_is_the_largest_that_the_smallest_slot_holds(
    stages: int, memory: int, samples: int, text: str
) -> None:
    asked = job(stages, step_samples=256, microbatch_samples="auto")
    fixed, because = fixed_by_memory(asked, LAYERS, slots(1 << 42, memory))
    training = fixed.training
    assert (training.microbatch_samples, training.microbatches) == (samples, 256 // samples)
    assert training.auto == ()
    assert because.startswith(f"microbatch_samples {samples}, so {256 // samples} microbatches: ")
    assert text in because
    assert fixed_by_memory(asked, LAYERS, slots(memory, 1 << 42)) == (fixed, because)
    written = job(stages, microbatch_samples=samples, microbatches=256 // samples)
    assert spec_digests(fixed) == spec_digests(written), "a checkpoint is that of the values"


@pytest.mark.parametrize(
    ("memory", "names"),
    [
        (1 << 40, ()),
        (75 * MIB, ("blocks.0", "blocks.1")),
        (MIB, ("blocks.0", "blocks.1", "blocks.2", "blocks.3")),
        (0, ()),
    ],
)
def test_layers_are_computed_again_where_memory_asks_for_it(memory: int, names: tuple[str, ...]) -> None:
    fixed, because = fixed_by_memory(job(recompute="auto", microbatches=8), LAYERS, slots(memory))
    assert fixed.training.recompute == names
    assert fixed.training.auto == ()
    assert because.startswith(f"recompute {len(names) or 'none'}")


def test_one_microbatch_of_the_largest_kind_that_fits_needs_nothing_again() -> None:
    asked = job(step_samples=64, microbatch_samples="auto", recompute="auto")
    fixed, because = fixed_by_memory(asked, LAYERS, slots(200 * MIB))
    assert (fixed.training.microbatch_samples, fixed.training.recompute) == (2, ())
    assert because.count(";") == 2


def devices(**memory: tuple[int, int]) -> NodeStatus:
    """A node with devices of so much memory each, shared by so many slots."""
    names = [name for name, (_, sharers) in memory.items() for _ in range(sharers)]
    there = node(devices=tuple(names))
    sized = [
        slot.model_copy(update={"memory_bytes": memory[slot.device][0] // memory[slot.device][1]})
        for slot in there.slots
    ]
    return there.model_copy(update={"slots": tuple(sized)})


class TestFewerSlots:
    """A stage that needs more than its slot's part of a device is refused with the way out."""

    def test_the_refusal_says_which_stage_how_much_over_and_with_how_many_slots_it_fits(self) -> None:
        need = plan("j", job(2), LAYERS, [devices(cpu=(1 << 40, 2))])
        assert not isinstance(need, NoRoom)
        needs = max(unit.requirements.memory_bytes for unit in need.units)
        shared = devices(cpu=(3 * needs, 12))
        refused = plan("j", job(2), LAYERS, [shared])
        assert isinstance(refused, NoRoom)
        assert "\n" not in refused.reason
        first, *_, last = refused.reason.split("; or ")
        assert first.startswith("stage ")
        assert "too little" in first
        assert "have fewer slots share the memory of a-n: with `dmsc join --slots " in last
        count = int(last.partition("--slots ")[2].partition("`")[0])
        assert isinstance(plan("j", job(2), LAYERS, [devices(cpu=(3 * needs, count))]), type(need)), last

    def test_it_counts_the_slots_of_all_devices_of_the_node(self) -> None:
        cards = devices(**{"cuda:0": (80 * MIB, 4), "cuda:1": (80 * MIB, 4)})
        assert fewer_slots([cards], 30 * MIB).startswith(
            "have fewer slots share the memory of a-n: with `dmsc join --slots 4` there each has 40 MiB"
        )

    @pytest.mark.parametrize("need", [0, 10 * MIB, 81 * MIB])
    def test_where_it_would_not_help_it_is_not_named(self, need: int) -> None:
        assert fewer_slots([devices(cpu=(80 * MIB, 4))], need) == ""
