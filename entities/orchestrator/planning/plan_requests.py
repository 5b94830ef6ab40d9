"""What the planner is asked for a job: its layers' costs, and what is free on the mesh.

Pure. Slots whose measured speeds differ by less than the measurements do count as equally fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from entities.orchestrator.planning.placement import STAGE, OpenRoom
from entities.orchestrator.planning.plan_rules import kept_edges, labels_for, rules_of
from entities.orchestrator.planning.segmentation import cut_edges
from entities.planner.layer_rules import with_rules
from entities.planner.network_topology import NetworkTopology, distances, measured_topology
from entities.planner.plan_request import PlanLayer, PlanRequest, PlanSlot
from schemas.cluster import NodeStatus, Slot
from schemas.job import JobSpec
from schemas.limits import SPEEDS_ALIKE
from schemas.memory_estimate import estimate_stage
from schemas.task_graph import ModelTopology

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
                # of a service each stage has the whole cache, whatever layers it has
                state_bytes=memory.state
                - memory.cache
                + memory.cache * parallel.stages // len(topology.layers),
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


@dataclass(frozen=True, kw_only=True)
class MeshNetwork:
    """What lies between nodes: a topology that the operator gave, or bandwidths by pair of agents' SIDs.

    `name`: of the topology's file.
    """

    topology: NetworkTopology | None = None
    name: str = ""
    bytes_per_s: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def missing(self, nodes: Iterable[NodeStatus]) -> str:
        """Which nodes a topology does not have, in words; empty: it has all, or there is none."""
        if self.topology is None:
            return ""
        hosts = set(self.topology.hosts)
        if lacking := sorted(node.sid for node in nodes if not {node.sid, node.node} & hosts):
            return (
                f"{self.name} has no host {', '.join(lacking[:4])}: places are without it; name its hosts as "
                "nodes or their agents are named"
            )
        return ""


def cluster_distances(topology: NetworkTopology, nodes: Iterable[NodeStatus]) -> dict[str, dict[str, int]]:
    """How many links lie between the clusters of these nodes, by a topology."""
    known = set(topology.hosts)
    hosts: dict[str, set[str]] = {}
    for node in nodes:
        hosts.setdefault(node.cluster, set()).add(node.sid if node.sid in known else node.node)
    return distances(topology, hosts)


MOST_MEASURED = 40
"""Nodes between which each measured pair counts: routes of all pairs take the fourth power of memory."""
UNEQUAL = 4.0
"""A measured link counts if it is so many times slower than the usual one: else it is noise."""
WORTH = 0.05
"""Of a step: links whose transfers take less decide nothing."""


def on_network(request: PlanRequest, network: MeshNetwork, step_ms: float) -> PlanRequest:
    """The request on what lies between its slots' nodes, where that may matter; else as it was.

    Args:
        request: without a network.
        network: of the mesh.
        step_ms: what a step is to take without it.
    """
    nodes = sorted({slot.node for slot in request.slots})
    if len(nodes) < 2:
        return request
    topology, hosts = network.topology, {slot.node: slot.host or slot.node for slot in request.slots}
    if topology is not None:
        known = set(topology.hosts)
        hosts = {node: node if node in known else host for node, host in hosts.items()}
        if not known.issuperset(hosts.values()):
            return request
    else:
        measured = {
            pair: speed
            for pair, speed in network.bytes_per_s.items()
            if set(pair) <= set(nodes) and speed > 0
        }
        if len(nodes) > MOST_MEASURED or not measured:
            return request
        usual, slowest = median(measured.values()), min(measured.values())
        most = max((layer.output_bytes for layer in request.layers), default=0.0)
        crossing_ms = 2e3 * most * request.microbatches / slowest
        if usual / slowest < UNEQUAL or crossing_ms < WORTH * step_ms:
            return request
        topology, hosts = measured_topology(measured, nodes), {node: node for node in nodes}
    return replace(
        request,
        slots=tuple(replace(slot, host=hosts[slot.node]) for slot in request.slots),
        hosts=topology.hosts,
        links=tuple((first, second, speed) for (first, second), speed in topology.links.items()),
    )


def alike_speeds(speeds: Iterable[float]) -> dict[float, float]:
    """The speed that each measured one counts as: the mean of its group."""
    groups: list[list[float]] = []
    for speed in sorted(set(speeds)):
        if groups and speed <= groups[-1][0] * SPEEDS_ALIKE:
            groups[-1].append(speed)
        else:
            groups.append([speed])
    return {speed: sum(group) / len(group) for group in groups for speed in group}
