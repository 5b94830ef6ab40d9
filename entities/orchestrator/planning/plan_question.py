"""From a question to the planner's request, and from its answer to what is told. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from entities.orchestrator.planning.eligible_slots import Records, bits_classes, eligible, query_of, refusal
from entities.orchestrator.planning.placement import Cordoned, NoRoom, OpenRoom, open_room
from entities.orchestrator.planning.plan_requests import request_for
from entities.orchestrator.planning.plan_rules import model_digest, open_to
from entities.orchestrator.planning.shape_choice import any_shape_request
from entities.orchestrator.planning.task_graph import room_for
from entities.planner.plan_request import NoPlan, PlanAnswer, PlanRequest
from schemas.accounts import PRICE_LABEL
from schemas.cluster import NodeStatus
from schemas.errors import BadJob
from schemas.job import JobSpec
from schemas.plans import PlanBody, PlanMade, PlanPlace, PlanStage
from schemas.task_graph import ModelTopology, Placement, PlanAlternative, PlanForecast


def asked(
    question: PlanBody,
    topology: ModelTopology,
    nodes: Sequence[NodeStatus],
    records: Records,
    occupied: Mapping[str, Sequence[Placement]],
    cordoned: Cordoned,
) -> tuple[JobSpec, ModelTopology, PlanRequest]:
    """The job with the question's rules, the layers that are planned, and what the planner is asked.

    Args:
        question: what somebody wants to know.
        topology: of the whole model.
        nodes: all of the mesh.
        records: the registry's, by SID.
        occupied: slots that are promised to jobs; empty where they count as free.
        cordoned: places that get no instance.

    Raises:
        BadJob: the question names what is not there, or nothing of the mesh is what the job requires.
        NoPlan: what it wants can't be kept, or too few slots are there.
    """
    spec = question.job
    if question.plan is not None:
        spec = spec.model_copy(update={"plan": question.plan})
    if question.layers is not None:
        topology = only(topology, *question.layers)
    if why := refusal(nodes, spec, records):
        raise BadJob(why)
    first: NoPlan | None = None
    for name in [""] if spec.requires.bits == "any" else bits_classes(nodes) or [""]:
        within = open_to(spec, eligible(nodes, query_of(spec, name), records))
        try:
            return spec, topology, _request(question, spec, topology, within, occupied, cordoned)
        except NoPlan as refused:
            first = first or refused
    assert first is not None
    raise first


def _request(
    question: PlanBody,
    spec: JobSpec,
    topology: ModelTopology,
    nodes: Sequence[NodeStatus],
    occupied: Mapping[str, Sequence[Placement]],
    cordoned: Cordoned,
) -> PlanRequest:
    room: OpenRoom | NoRoom
    if not question.best and not spec.parallel.auto:
        room = room_for(spec, nodes, occupied, cordoned)
        if isinstance(room, NoRoom):
            raise NoPlan(room.reason, never=room.never)
        return request_for(spec, topology, room)
    room = open_room(nodes, 1, clusters=spec.parallel.clusters, occupied=occupied, cordoned=cordoned)
    if isinstance(room, NoRoom):
        raise NoPlan(room.reason, never=room.never)
    return any_shape_request(spec, topology, room, question.slots or spec.parallel.slots)


def only(topology: ModelTopology, first: str, last: str) -> ModelTopology:
    """The layers from one to another, as a model of their own.

    Raises:
        BadJob: it has no such layer, or they come in another order.
    """
    names = [layer.name for layer in topology.layers]
    for name in (first, last):
        if name not in names:
            shown = ", ".join(names[:6]) + (f" … ({len(names)} in all)" if len(names) > 6 else "")
            raise BadJob(f"layers: no layer is called {name}: the model has {shown}")
    low, high = names.index(first), names.index(last) + 1
    if low >= high:
        raise BadJob(f"layers: {first} comes after {last} in the model: give the earlier one first")
    inside = range(low, high)
    layers = tuple(
        layer.model_copy(update={"index": layer.index - low}) for layer in topology.layers[low:high]
    )
    edges = tuple(
        edge.model_copy(
            update={"upstream": max(-1, edge.upstream - low), "downstream": edge.downstream - low}
        )
        for edge in topology.edges
        if edge.downstream in inside
    )
    tied = tuple(
        kept
        for group in topology.tied
        if len(kept := tuple(each - low for each in group if each in inside)) > 1
    )
    taken = topology.layers[low - 1].output_bytes if low else topology.input_bytes
    changed = {
        "layers": layers,
        "edges": edges,
        "tied": tied,
        "shared": (),
        "input_bytes": taken,
        "parameters": sum(layer.parameters for layer in layers),
    }
    return topology.model_copy(update=changed)


def told(
    spec: JobSpec,
    topology: ModelTopology,
    request: PlanRequest,
    answer: PlanAnswer,
    nodes: Iterable[NodeStatus],
) -> PlanMade:
    """The plan in the words of the mesh: stages, slots, time and price."""
    node_of = {node.sid: node for node in nodes}
    prices = {
        (node.sid, slot.index): slot.labels.get(PRICE_LABEL)
        for node in node_of.values()
        for slot in node.slots
    }
    stages = []
    for number, (first, last) in enumerate(answer.cuts):
        places = [place for place in answer.places if place.stage == number]
        stages.append(
            PlanStage(
                first=topology.layers[first].name,
                last=topology.layers[last - 1].name,
                first_layer=first,
                last_layer=last - 1,
                replicas=answer.replicas[number],
                labels=tuple(
                    sorted({label for layer in request.layers[first:last] for label in layer.pinned_to})
                ),
                places=tuple(
                    PlanPlace(
                        replica=place.replica,
                        cluster=request.slots[place.slot].cluster,
                        node=node_of[request.slots[place.slot].node].node,
                        slot=request.slots[place.slot].index,
                    )
                    for place in places
                ),
            )
        )
    steps = spec.training.steps
    hours = None if steps is None else steps * answer.forecast.step_ms / 3.6e6
    used = [request.slots[place.slot] for place in answer.places]
    costs = [_number(prices[slot.node, slot.index]) for slot in used]
    price = None
    if hours is not None and all(cost is not None for cost in costs):
        price = hours * sum(cost for cost in costs if cost is not None)
    return PlanMade(
        stages=tuple(stages),
        forecast=PlanForecast(
            **asdict(answer.forecast),
            planned_by=answer.planned_by,
            alternatives=tuple(PlanAlternative(**asdict(other)) for other in answer.alternatives),
        ),
        reason=answer.reason,
        slots=len(used),
        hours=hours,
        price=price,
        cuts=tuple(topology.layers[first].name for first, _ in answer.cuts[1:]),
        model=model_digest(topology),
    )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
