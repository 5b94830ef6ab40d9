"""The task graph of an analysed model, and its first communication policy (draft §4.4(1), §4.5(2))."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from entities.orchestrator.planning.kept_apart import owners_constraints
from entities.orchestrator.planning.memory_fit import fewer_slots
from entities.orchestrator.planning.placement import (
    STAGE,
    Cordoned,
    NoRoom,
    OpenRoom,
    facts_digest,
    open_room,
    placement,
    with_data_units,
)
from entities.orchestrator.planning.plan_requests import request_for
from entities.orchestrator.planning.plan_rules import open_to
from entities.planner.plan_at_once import cut_at_once, plan_at_once, steps_ms
from entities.planner.plan_request import NoPlan, PlanAnswer, PlanRequest
from entities.planner.windows import in_flight, pull_window, window
from schemas.cluster import NodeStatus
from schemas.job import JobSpec
from schemas.memory_estimate import MemoryEstimate, estimate_stage, largest_room, refusal
from schemas.signals import CommunicationPolicy, StagePolicy
from schemas.task_graph import (
    ENTRY,
    ComputeRequirements,
    Constraint,
    ModelTopology,
    Placement,
    PlanAlternative,
    PlanForecast,
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
    """Decomposes the job into units, links them, and places them: at once, without a search.

    Raises:
        BadJob: the model can't be cut as asked.
    """
    room = room_for(spec, nodes, occupied, cordoned)
    if isinstance(room, NoRoom):
        return room
    try:
        request = request_for(spec, topology, room)
    except NoPlan as refused:
        return NoRoom(str(refused), never=refused.never)
    return plan_in(job, spec, topology, room, request)


def plan_in(
    job: str, spec: JobSpec, topology: ModelTopology, room: OpenRoom, request: PlanRequest
) -> TaskGraph | NoRoom:
    """`plan` where it is known what is free, and what is asked for."""
    try:
        answer = plan_at_once(request)
    except NoPlan:
        try:
            answer = plan_at_once(request.relaxed())
        except NoPlan as refused:
            return no_room(refused, spec, topology, room, request)
    return graph_for(job, spec, topology, room, request, answer)


def room_for(
    spec: JobSpec,
    nodes: Sequence[NodeStatus],
    occupied: Mapping[str, Sequence[Placement]] | None = None,
    cordoned: Cordoned | None = None,
) -> OpenRoom | NoRoom:
    """What is free for a job, if that is enough for its instances."""
    wanted = sum(spec.parallel.replicas_per_stage()) + sum(spec.parallel.standbys_per_stage())
    nodes = open_to(spec, nodes)
    return open_room(nodes, wanted, clusters=spec.parallel.clusters, occupied=occupied, cordoned=cordoned)


def no_room(
    refused: NoPlan, spec: JobSpec, topology: ModelTopology, room: OpenRoom, request: PlanRequest
) -> NoRoom:
    """Why there is no plan: what the job's owner could change, where a stage fits on no device."""
    replicas, standbys = spec.parallel.replicas_per_stage(), spec.parallel.standbys_per_stage()
    largest = largest_room(room.nodes)
    for stage, (first, last) in enumerate(cut_at_once(replace(request, slots=()))):
        layers = topology.layers[first:last]
        memory = stage_memory(spec, topology, (first, last), stage, replicas, standbys)
        if reason := refusal(stage, memory, largest, layers, spec):
            return NoRoom(reason, never=True)
    way_out = fewer_slots(room.nodes, refused.needs_bytes)
    return NoRoom("; or ".join(filter(None, (str(refused), way_out))), never=refused.never)


def graph_for(
    job: str,
    spec: JobSpec,
    topology: ModelTopology,
    room: OpenRoom,
    request: PlanRequest,
    answer: PlanAnswer,
) -> TaskGraph | NoRoom:
    """The task graph of a plan, its units in the slots that the plan gives them.

    Args:
        job: its id.
        spec: the job.
        topology: its analysed model.
        room: from which the request was made.
        request: what the planner was asked.
        answer: its plan.
    """
    replicas = answer.replicas
    standbys = spec.parallel.standbys_per_stage()
    within = spec.parallel.replica_range
    cuts = answer.cuts
    units = making_units(job, spec, topology, data_replicas=max(1, min(len(room.order), replicas[0])))
    constraints: list[Constraint] = []
    for stage, (first, last) in enumerate(cuts):
        layers = topology.layers[first:last]
        memory = stage_memory(spec, topology, (first, last), stage, replicas, standbys)
        requirements = ComputeRequirements(
            memory_bytes=min(memory.state + memory.activations, answer.forecast.memory_bytes[stage]),
            cost_ms=sum(layer.forward_ms + layer.backward_ms for layer in layers),
            compute_threads=spec.training.compute_threads,
            measured_speed=topology.speed.get(STAGE, 1.0),
            labels=tuple(
                sorted({label for layer in request.layers[first:last] for label in layer.pinned_to})
            ),
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
    constraints += owners_constraints(request.rules, cuts, units)
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
    nodes = {node.sid: node for node in room.nodes}
    by_number = {(unit.stage, unit.replica): unit for unit in units if unit.kind is UnitKind.STAGE}
    slots = [(by_number[place.stage, place.replica], request.slots[place.slot]) for place in answer.places]
    placed = with_data_units(
        units, [placement(unit, nodes[slot.node], slot.index) for unit, slot in slots], room
    )
    if isinstance(placed, NoRoom):
        return placed
    return TaskGraph(
        units=tuple(units),
        edges=tuple(edges),
        constraints=tuple(constraints),
        placements=placed,
        reason="; ".join(filter(None, (answer.reason, topology.unmatched_weights))),
        code_digest=topology.code_digest,
        data_digest=topology.data_digest,
        inexact=topology.inexact,
        compiler=topology.compiler,
        layer_count=len(topology.layers),
        parameters=topology.parameters,
        batch=topology.batch,
        sources=topology.sources,
        facts_digest=facts_digest(placed, room.nodes),
        tied_stages=tied_stages(topology.shared, cuts),
        forecast=PlanForecast(
            **asdict(answer.forecast),
            planned_by=answer.planned_by,
            alternatives=tuple(PlanAlternative(**asdict(other)) for other in answer.alternatives),
            by_replicas=()
            if within is None
            else steps_ms(request, cuts, range(within.least, within.max + 1)),
        ),
    )


def stage_memory(
    spec: JobSpec,
    topology: ModelTopology,
    cut: tuple[int, int],
    stage: int,
    replicas: Sequence[int],
    standbys: Sequence[int],
) -> MemoryEstimate:
    """The memory of one instance of a stage. `replicas`, `standbys`: of each stage."""
    return estimate_stage(
        topology.layers[cut[0] : cut[1]],
        spec,
        in_flight=in_flight(replicas, stage),
        replicas=replicas[stage] + standbys[stage],
        optimizer_bytes_per_parameter=topology.optimizer_bytes,
    )


def making_units(job: str, spec: JobSpec, topology: ModelTopology, *, data_replicas: int) -> list[TaskUnit]:
    """The units that make batches: of the data, and of each function of `data.preprocess` (ADR-0062).

    What the last of them gives is what stage 0 takes.
    """
    if spec.serve is not None:
        return []  # what it is asked comes from gateways
    chain = spec.data.preprocess
    boundaries = (*topology.records, topology.batch) if chain else (topology.batch,)
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

    replicas = [workers(stage) for stage in stages]
    entries = (unit.output_schema for unit in graph.units if unit.stage == ENTRY)

    return CommunicationPolicy(
        job=job,
        revision=revision,
        entry_gateway=entry_gateway,
        clusters=tuple(sorted({place.cluster for place in graph.placements})),
        stages=tuple(
            StagePolicy(
                stage=stage,
                weights={unit.sid: float(not unit.standby) for unit in graph.stage(stage)},
                window=window(replicas, stage, workers(stage - 1)),
                reference_ms=reference_ms(graph, stage),
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
        distances=graph.distances,
        entry_schema=next(iter(entries), ()),
        reason="initial: equal weights",
    )


def reference_ms(graph: TaskGraph, stage: int) -> float:
    """What a microbatch of a stage takes on a device of speed 1."""
    return graph.stage(stage)[0].requirements.reference_ms
