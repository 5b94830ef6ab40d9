"""The memory that a re-cut needs (ADR-0102)."""

from __future__ import annotations

from typing import Any

import pytest

from entities.orchestrator.membership.recut_plan import check_room, recut_graph
from entities.orchestrator.planning.task_graph import stage_memory
from schemas.errors import Conflict
from schemas.plain_text import shown
from tests.builders.graphs import graph, layer, node, placement, topology, unit
from tests.builders.jobs import spec

CUTS = ((0, 4), (4, 8))
STAGES = [
    unit(f"j-s{stage}-r0", first_layer=first, last_layer=last) for stage, (first, last) in enumerate(CUTS)
]


SHARING = {"lr": 0.1}
NOT_SHARING = (
    {"name": "sgd", "lr": 0.1},
    {"lr": 0.1, "groups": [{"match": "*.bias", "name": "sgd"}]},
)


@pytest.mark.parametrize("optimizer", [SHARING, *NOT_SHARING])
def test_who_lacks_memory_is_named_with_how_much(optimizer: dict[str, Any]) -> None:
    """Kept layers are shared: only what is taken, and sums of its own, come on top until the switch.

    Only AdamW's state is shared; with another optimizer what is built has all of its own.
    """
    model = topology(*(layer(at, parameters=1000, parameter_bytes=4000) for at in range(8)))
    training = {"microbatches": 1, "steps": 4, "optimizer": optimizer}
    job = spec(parallel={"stages": 2, "replicas": 1}, training=training)
    places = tuple(placement(each.sid, slot) for slot, each in enumerate(STAGES))
    before = graph(*STAGES, layer_count=8, placements=places)
    after = recut_graph(before, job, model, ((0, 6), (6, 8)), (), 1)
    holds = stage_memory(job, model, (0, 4), 0, [1, 1], [0, 0])
    then = stage_memory(job, model, (0, 6), 0, [1, 1], [0, 0])
    taken, sums = 2 * 1000 * (4 + 8 + 8 + 4), 6 * 1000 * 8
    built = sums if optimizer is SHARING else then.state
    needs = holds.state + taken + built + max(holds.activations, then.activations)

    def checked(memory_bytes: int) -> None:
        slots = tuple(each.model_copy(update={"memory_bytes": memory_bytes}) for each in node().slots)
        check_room(before, after, job, model, {"j-s0-r0": node().model_copy(update={"slots": slots})})

    checked(needs)
    with pytest.raises(Conflict) as refused:
        checked(needs - 2048)
    assert str(refused.value) == (
        f"j-s0-r0 on n lacks 2 KiB of memory: with the layers that it takes it needs {shown(needs)}, and "
        f"its slot has {shown(needs - 2048)}"
    )
