"""Stages and replicas that a job leaves to the planner, chosen when its model has been analysed.

They are chosen for the fastest slots of its clusters, as many as it may use, whoever holds them now. The
shape is the job's from then on, and it waits for its slots as any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from entities.orchestrator.planning.placement import OpenRoom
from entities.orchestrator.planning.plan_requests import OpenShape, request_for, speed_of
from entities.orchestrator.planning.plan_rules import labels_for, pinned_together, rules_of
from entities.planner.plan_request import LayerRule, NoPlan, PlanAnswer, PlanRequest
from entities.planner.planning_process import PlanningConfig, beside_the_loop, searched_with_less
from schemas.cluster import NodeStatus, Slot
from schemas.errors import BadJob
from schemas.job import JobSpec
from schemas.task_graph import ModelTopology


async def with_shape(
    spec: JobSpec,
    topology: ModelTopology,
    nodes: Iterable[NodeStatus],
    config: PlanningConfig = PlanningConfig(),
) -> tuple[JobSpec, str]:
    """The job with a number for each `auto` of its section `parallel`, and why these.

    Raises:
        BadJob: no shape fits; what stands against it, and what to change.
    """
    try:
        request = await beside_the_loop(shape_request, spec, topology, list(nodes))
    except NoPlan as refused:
        raise BadJob(str(refused)) from refused
    try:
        answer = await searched_with_less(request, config)
    except NoPlan as refused:
        raise BadJob(f"parallel: auto: {refused}") from refused
    others = "".join(f"; not {other.plan}: {other.why_not}" for other in answer.alternatives)
    return chosen_shape(spec, answer), f"parallel: auto chose {answer.reason}{others}"


def shape_request(spec: JobSpec, topology: ModelTopology, nodes: Iterable[NodeStatus]) -> PlanRequest:
    """What the planner is asked: any shape of the fastest slots, all of them counted as free.

    Raises:
        BadJob: no node has joined that the job may use.
        NoPlan: as of `request_for`.
    """
    clusters = spec.parallel.clusters
    usable = sorted(
        (node for node in nodes if not clusters or node.cluster in clusters), key=lambda node: node.sid
    )
    everything = {node.sid: node.slots for node in usable}
    if not any(everything.values()):
        where = ", ".join(clusters) or "any cluster"
        raise BadJob(f"parallel: auto: no node of {where} has joined: join one, or give stages and replicas")
    order = list(clusters) or sorted({node.cluster for node in usable})
    room = OpenRoom(usable, order, everything, usable)
    return any_shape_request(spec, topology, room, spec.parallel.slots)


def any_shape_request(
    spec: JobSpec, topology: ModelTopology, room: OpenRoom, most: int | None
) -> PlanRequest:
    """What the planner is asked: any shape, or with the job's own stages any replicas, on the fastest slots.

    Args:
        spec: the job.
        topology: its analysed model.
        room: what it may use, one slot at least.
        most: slots of them; None: all.

    Raises:
        NoPlan: as of `request_for`.
    """
    free = fastest_slots(room.nodes, room.free, most, rules_of(spec, topology))
    stages = spec.parallel.stages if spec.parallel.auto == ("replicas",) else None
    whole = one_stage(spec, sum(map(len, free.values())))
    fastest = OpenRoom(room.nodes, room.order, free, room.open_to_data)
    return request_for(whole, topology, fastest, shape=OpenShape(stages))


def fastest_slots(
    nodes: Sequence[NodeStatus],
    free: Mapping[str, Sequence[Slot]],
    most: int | None,
    rules: Iterable[LayerRule],
) -> dict[str, list[Slot]]:
    """At most so many slots, the fastest, then the largest; among them one for each pinned layer, if there is
    one.

    Args:
        nodes: of the mesh that may be used.
        free: their slots that may be, by agent.
        most: None: all of them.
        rules: of the job.
    """
    wanted = pinned_together(rules)
    labels = {label for mine in wanted for label in mine}
    places = sorted(
        ((node, slot) for node in nodes for slot in free[node.sid]),
        key=lambda place: (
            -speed_of(place[1]),
            -place[1].memory_bytes,
            place[0].sid,
            place[1].index,
        ),
    )
    have = [frozenset(labels_for(node, slot, labels)) for node, slot in places]
    chosen = list(range(len(places)))[:most]
    kept: set[int] = set()
    for mine in sorted(wanted, key=lambda each: (-len(each), sorted(each))):
        fitting = [at for at in range(len(places)) if mine <= have[at]]
        there = next((at for at in fitting if at in chosen), None)
        leaving = next((at for at in reversed(chosen) if at not in kept), None)
        if there is None and fitting and leaving is not None:
            there = fitting[0]
            chosen[chosen.index(leaving)] = there
        if there is not None:
            kept.add(there)
    return {node.sid: [places[at][1] for at in chosen if places[at][0].sid == node.sid] for node in nodes}


def one_stage(spec: JobSpec, replicas: int) -> JobSpec:
    """The job as one stage, of which a request for any shape is made: cut wherever its ties allow."""
    parallel = spec.parallel.model_copy(
        update={
            "stages": 1,
            "replicas": replicas,
            "standbys": 0,
            "slots": None,
            "auto": (),
            "segmentation": "measured",
        }
    )
    return spec.model_copy(update={"parallel": parallel})


def chosen_shape(spec: JobSpec, answer: PlanAnswer) -> JobSpec:
    """The job with the stages and replicas of a plan."""
    parallel = spec.parallel.model_copy(
        update={
            "stages": len(answer.replicas),
            "replicas": answer.replicas,
            "standbys": 0,
            "auto": (),
            "slots": None,
        }
    )
    return spec.model_copy(update={"parallel": parallel})
