"""How large a stage's window may become: as planned, or larger where its instances' slots have the memory."""

from __future__ import annotations

from collections.abc import Mapping

from entities.planner.windows import window
from schemas.job import JobSpec
from schemas.memory_estimate import estimate_stage
from schemas.task_graph import ModelTopology, TaskGraph, UnitKind

MOST = 4
"""Times the planned window: more hides load from the choice of the next hop."""


def largest_windows(
    spec: JobSpec, graph: TaskGraph, topology: ModelTopology | None, memory_bytes: Mapping[str, int]
) -> dict[int, int]:
    """The largest window of each stage.

    Args:
        spec: the job.
        graph: as deployed.
        topology: as analysed; None: not known, then windows grow no further than planned.
        memory_bytes: of the slot of each unit; 0, or no entry: not known.
    """
    stages = sorted({unit.stage for unit in graph.units if unit.kind is UnitKind.STAGE})
    workers = {stage: sum(not unit.standby for unit in graph.stage(stage)) for stage in (-1, *stages)}
    replicas = [workers[stage] for stage in stages]
    found = {}
    for stage in stages:
        senders = max(1, workers[stage - 1])
        found[stage] = planned = window(replicas, stage, senders)
        units = graph.stage(stage)
        room = min((memory_bytes.get(unit.sid, 0) for unit in units), default=0)
        if topology is None or not room:
            continue
        layers = topology.layers[units[0].first_layer : units[0].last_layer]
        for larger in range(planned + 1, MOST * planned + 1):
            need = estimate_stage(
                layers,
                spec,
                in_flight=min(spec.training.microbatches, larger * senders),
                replicas=len(units),
                optimizer_bytes_per_parameter=topology.optimizer_bytes,
            )
            if need.total > room:
                break
            found[stage] = larger
    return found
