"""What the planner is asked for a job: its layers' costs, and what is free on the mesh.

Pure. Slots whose measured speeds differ by less than the measurements do count as equally fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from entities.orchestrator.planning.placement import OpenRoom
from entities.orchestrator.planning.plan_rules import kept_edges, labels_for, rules_of
from entities.orchestrator.planning.segmentation import cut_edges
from entities.planner.layer_rules import with_rules
from entities.planner.plan_request import PlanAnswer, PlanLayer, PlanRequest, PlanSlot
from schemas.cluster import Slot
from schemas.job import JobSpec
from schemas.limits import SPEEDS_ALIKE
from schemas.memory_estimate import estimate_stage
from schemas.task_graph import ModelTopology

STAGE = "stage"
"""The kind of work (`Capability.speed`) by which a stage's time is compared."""
SUMS_BYTES = {True: 9, False: 4}
"""Bytes of a trained parameter, as replicas exchange their sums: exact ones packed (ADR-0066), or floats."""


@dataclass(frozen=True, kw_only=True)
class ForecastConstants:
    """What a step takes beside computing and links: begin, prepare, decide, commit.

    Measured on two cores that all instances share (`make bench-forecast`); more cores take less.
    """

    constant_ms: float = 8.0
    instance_ms: float = 6.5
    """For each instance that works."""


@dataclass(frozen=True)
class OpenShape:
    """What a job leaves to the planner: the replicas, and where None the stages."""

    stages: int | None = None


def request_for(
    spec: JobSpec,
    topology: ModelTopology,
    room: OpenRoom,
    config: ForecastConstants = ForecastConstants(),
    *,
    shape: OpenShape | None = None,
) -> PlanRequest:
    """The planner's request for a job.

    Args:
        spec: the job.
        topology: its analysed model.
        room: what is free for it.
        config: what a step takes beside computing.
        shape: what the planner may choose; None: the job's own stages and replicas.

    Raises:
        BadJob: the model can't be cut as asked, or the job's section `plan` names what is not there.
        NoPlan: what `plan` says can't be kept, or contradicts itself.
    """
    parallel = spec.parallel
    replicas = parallel.replicas_per_stage()
    exchanged = SUMS_BYTES[spec.training.exact_accumulation]
    measured_at = topology.speed.get(STAGE, 1.0)
    layers = []
    for layer in topology.layers:
        memory = estimate_stage(
            (layer,),
            spec,
            in_flight=1,
            replicas=max(replicas) + max(parallel.standbys_per_stage()),
            optimizer_bytes_per_parameter=topology.optimizer_bytes,
        )
        layers.append(
            PlanLayer(
                name=layer.name,
                work_ms=(layer.forward_ms + layer.backward_ms) * measured_at,
                state_bytes=memory.state,
                activation_bytes=layer.activation_bytes,
                sums_bytes=exchanged * (layer.parameters - layer.frozen),
                output_bytes=layer.output_bytes,
            )
        )
    rules = rules_of(spec, topology)
    wanted = {rule.label for rule in rules if rule.label}
    stages = parallel.stages if shape is None else shape.stages
    edges = cut_edges(topology.layers, stages or 1, tied=topology.tied, method=parallel.segmentation)
    edges = kept_edges(spec, topology, edges, stages)
    if spec.plan.cuts is not None:
        stages = len(edges) - 1
    speeds = [speed_of(slot) for slots in room.free.values() for slot in slots]
    alike = alike_speeds(speeds)
    request = PlanRequest(
        layers=tuple(layers),
        slots=tuple(
            PlanSlot(
                node=node.sid,
                cluster=node.cluster,
                index=slot.index,
                memory_bytes=slot.memory_bytes,
                speed=alike[speed_of(slot)],
                labels=labels_for(node, slot, wanted),
                host=node.node,
            )
            for node in room.nodes
            for slot in room.free[node.sid]
        ),
        clusters=tuple(room.order),
        microbatches=spec.training.microbatches,
        input_bytes=topology.input_bytes,
        constant_ms=config.constant_ms,
        instance_ms=config.instance_ms,
        stages=stages,
        replicas=replicas if shape is None else None,
        standbys=parallel.standbys_per_stage() if shape is None else (),
        edges=edges,
    )
    return with_rules(request, rules)


def speed_of(slot: Slot) -> float:
    """What a slot's speed counts as: as measured, but for one that its node's agent judged to give less."""
    return slot.speed.get(STAGE, 1.0) * slot.performance


def still_open(room: OpenRoom, request: PlanRequest, answer: PlanAnswer) -> bool:
    """Whether all slots of an earlier request's plan are free now."""
    free = {(sid, slot.index) for sid, slots in room.free.items() for slot in slots}
    chosen = (request.slots[place.slot] for place in answer.places)
    return all((slot.node, slot.index) in free for slot in chosen)


def alike_speeds(speeds: Iterable[float]) -> dict[float, float]:
    """The speed that each measured one counts as: the mean of its group."""
    groups: list[list[float]] = []
    for speed in sorted(set(speeds)):
        if groups and speed <= groups[-1][0] * SPEEDS_ALIKE:
            groups[-1].append(speed)
        else:
            groups.append([speed])
    return {speed: sum(group) / len(group) for group in groups for speed in group}
