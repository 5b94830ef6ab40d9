"""The task graph of an analysed model, and its first communication policy (draft §4.4(1), §4.5(2))."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from entities.orchestrator.planning.placement import Cordoned, NoRoom, place
from entities.orchestrator.planning.segmentation import segment
from schemas.cluster import NodeStatus
from schemas.job import JobSpec
from schemas.memory_estimate import estimate_stage, largest_room, refusal
from schemas.signals import CommunicationPolicy, StagePolicy
from schemas.task_graph import (
    ENTRY,
    ComputeRequirements,
    Constraint,
    ModelTopology,
    Placement,
    TaskEdge,
    TaskGraph,
    TaskUnit,
    UnitKind,
    is_before_entry,
)


def plan(
    job: str,
    spec: JobSpec,
    topology: ModelTopology,
    nodes: Sequence[NodeStatus],
    occupied: Mapping[str, Sequence[Placement]] | None = None,
    cordoned: Cordoned | None = None,
) -> TaskGraph | NoRoom:
    """Decomposes the job into units, links them, and places them.

    Raises:
        BadJob: the model can't be cut as asked.
    """
    replicas = spec.parallel.replicas_per_stage()
    standbys = spec.parallel.standbys_per_stage()
    cuts, why = segment(topology.layers, replicas, tied=topology.tied, method=spec.parallel.segmentation)
    clusters = list(spec.parallel.clusters) or sorted({node.cluster for node in nodes})
    units = making_units(job, spec, topology, data_replicas=max(1, min(len(clusters), replicas[0])))
    constraints: list[Constraint] = []
    room = largest_room(node for node in nodes if node.cluster in clusters)
    for stage, (first, last) in enumerate(cuts):
        layers = topology.layers[first:last]
        flying = in_flight(len(cuts), stage, replicas[stage])
        memory = estimate_stage(
            layers,
            spec,
            in_flight=flying,
            replicas=replicas[stage] + standbys[stage],
            optimizer_bytes_per_parameter=topology.optimizer_bytes,
        )
        if reason := refusal(stage, memory, room, layers, spec):
            return NoRoom(reason, never=True)
        requirements = ComputeRequirements(
            memory_bytes=memory.state + memory.activations,
            cost_ms=sum(layer.forward_ms + layer.backward_ms for layer in layers),
            compute_threads=spec.training.compute_threads,
        )
        count = replicas[stage] + standbys[stage]
        sids = tuple(f"{job}-s{stage}-r{replica}" for replica in range(count))
        for replica, sid in enumerate(sids):
            units.append(
                TaskUnit(
                    sid=sid,
                    kind=UnitKind.STAGE,
                    stage=stage,
                    replica=replica,
                    first_layer=first,
                    last_layer=last,
                    input_schema=topology.layers[first - 1].output if first else (),
                    output_schema=layers[-1].output,
                    requirements=requirements,
                    tags=(f"job:{job}", f"stage:{stage}", f"replica:{replica}"),
                    standby=replica >= replicas[stage],
                )
            )
        if len(sids) > 1:
            constraints.append(
                Constraint(kind="spread", sids=sids, reason="losing a cluster must not lose the stage")
            )
        if stage:
            constraints.append(
                Constraint(
                    kind="order",
                    sids=(f"{job}-s{stage - 1}-r0", sids[0]),
                    reason="layer-wise propagation",
                )
            )
    edges = [
        TaskEdge(upstream=stage, downstream=stage + 1, bytes_per_microbatch=topology.input_bytes)
        for stage in range(units[0].stage, 0)
    ]
    edges += [
        TaskEdge(
            upstream=stage - 1,
            downstream=stage,
            bytes_per_microbatch=topology.layers[cuts[stage][0] - 1].output_bytes,
        )
        for stage in range(1, len(cuts))
    ]
    placed = place(units, nodes, clusters=spec.parallel.clusters, occupied=occupied, cordoned=cordoned)
    if isinstance(placed, NoRoom):
        return placed
    return TaskGraph(
        units=tuple(units),
        edges=tuple(edges),
        constraints=tuple(constraints),
        placements=placed,
        reason="; ".join(filter(None, (why, topology.unmatched_weights))),
        code_digest=topology.code_digest,
        data_digest=topology.data_digest,
        inexact=topology.inexact,
        compiler=topology.compiler,
        layer_count=len(topology.layers),
        parameters=topology.parameters,
        batch=topology.batch,
        sources=topology.sources,
        tied_stages=tied_stages(topology.shared, cuts),
    )


def making_units(job: str, spec: JobSpec, topology: ModelTopology, *, data_replicas: int) -> list[TaskUnit]:
    """The units that make batches: of the data, and of each function of `data.preprocess` (ADR-0062).

    What the last of them gives is what stage 0 takes.
    """
    chain = spec.data.preprocess
    boundaries = (*topology.records, topology.batch) if chain else ((),)
    units = [
        TaskUnit(
            sid=f"{job}-data-r{replica}",
            kind=UnitKind.DATA,
            stage=ENTRY - len(chain),
            replica=replica,
            output_schema=boundaries[0],
            tags=(f"job:{job}", "data", f"replica:{replica}"),
        )
        for replica in range(data_replicas)
    ]
    for number, function in enumerate(chain):
        units += [
            TaskUnit(
                sid=f"{job}-{function.name}-r{replica}",
                kind=UnitKind.PREPROCESS,
                stage=ENTRY - len(chain) + 1 + number,
                replica=replica,
                name=function.name,
                input_schema=boundaries[number],
                output_schema=boundaries[number + 1],
                tags=(f"job:{job}", "preprocess", f"preprocess:{function.name}", f"replica:{replica}"),
            )
            for replica in range(function.replicas)
        ]
    return units


def tied_stages(
    shared: Sequence[Sequence[int]], cuts: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """Groups of stages that share a parameter; a stage is in one group at most.

    Args:
        shared: Groups of layers that share a parameter.
        cuts: (first, last) layer of each stage, the last exclusive.
    """
    groups: list[set[int]] = []
    for layers in shared:
        stages = {
            stage for stage, (first, last) in enumerate(cuts) if any(first <= at < last for at in layers)
        }
        for other in [group for group in groups if group & stages]:
            groups.remove(other)
            stages |= other
        groups.append(stages)
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))


def why_inexact(spec: JobSpec, graph: TaskGraph) -> str:
    """Why the weights' bits may depend on which instance computed what; empty where they don't."""
    sums = "" if spec.training.exact_accumulation else "training.exact_accumulation is off"
    mixed = "requires.bits is any" if spec.requires.bits == "any" else ""
    return "; ".join(filter(None, (sums, mixed, graph.inexact)))


def first_policy(
    job: str, spec: JobSpec, graph: TaskGraph, entry_gateway: str, revision: int
) -> CommunicationPolicy:
    """Equal weights, and windows that keep a pipeline full without hiding load (see `window`)."""
    stages = sorted({unit.stage for unit in graph.units if unit.kind is UnitKind.STAGE})

    def workers(stage: int) -> int:
        return sum(not unit.standby for unit in graph.stage(stage))

    return CommunicationPolicy(
        job=job,
        revision=revision,
        entry_gateway=entry_gateway,
        clusters=tuple(sorted({place.cluster for place in graph.placements})),
        stages=tuple(
            StagePolicy(
                stage=stage,
                weights={unit.sid: float(not unit.standby) for unit in graph.stage(stage)},
                window=window(len(stages), stage, workers(stage - 1), workers(stage)),
            )
            for stage in stages
        )
        + tuple(
            StagePolicy(
                stage=stage,
                weights={unit.sid: 1.0 for unit in graph.stage(stage)},
                window=pull_window(
                    spec.training.microbatches, len(graph.stage(stage + 1)), len(graph.stage(stage))
                ),
            )
            for stage in sorted({unit.stage for unit in graph.units if is_before_entry(unit.stage)})
        ),
        algorithm=spec.routing.algorithm,
        reason="initial: equal weights",
    )


def in_flight(stages: int, stage: int, replicas: int) -> int:
    """Microbatches that a replica may hold at once: computed forward, but not yet backward.

    If hops took no time and all replicas were equally fast, a stage would need `stages - stage` of them to
    keep the later stages busy (1F1B). As many again hide the hops. Replicas of different speed queue up
    behind slower ones, and need two more, except in the last stage. The price is memory for activations.
    `tests/sim/test_routing.py` prints what remains of the bubble, and of the bound of unequal replicas.
    """
    unequal = 2 if replicas > 1 and stage < stages - 1 else 0
    return 2 * (stages - stage) + unequal


def pull_window(microbatches: int, senders: int, replicas: int) -> int:
    """Microbatches that one unit before stage 0 may ask one unit before it for at once.

    They hold no activations, only samples: as many as keep them busy for this step and the next, within what
    memory should hold.
    """
    return max(2, min(16, math.ceil(2 * microbatches / max(1, senders * replicas))))


def window(stages: int, stage: int, senders: int, replicas: int) -> int:
    """Microbatches that one sender may have open at one receiver: its part of what the receiver may hold.

    More would only wait in queues that the choice of the next hop can't see.
    """
    return max(1, math.ceil(in_flight(stages, stage, replicas) / max(1, senders)))
