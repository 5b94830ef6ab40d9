"""The slots that a job may use, by what their nodes registered (draft §1: by content, not by address). Pure.

A node counts if its agent's record in the registry matches the job's query, and a slot if its capability
does. All devices of a job are of one class of bits, which the first plan chooses, or the checkpoint that
`resume_from` names, and the job's record keeps: growth, moves and a resumption stay in it (ADR-0075).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from entities.orchestrator.planning.placement import NoRoom
from schemas.cluster import NodeStatus, Slot
from schemas.envelope import EntityKind
from schemas.job import JobSpec
from schemas.registry import InstanceState, Resolve, ServiceRecord, is_label_tag, label_tag
from schemas.task_graph import TaskGraph

Records = Mapping[str, ServiceRecord]


def query_of(spec: JobSpec, bits_class: str = "") -> Resolve:
    """What the registry is asked for: the node agents with places for this job.

    Args:
        spec: the job.
        bits_class: the one that it has; empty: none yet.
    """
    requires = spec.requires
    return Resolve(
        prefix="entity/cluster",
        kind=EntityKind.CLUSTER,
        state=InstanceState.ACTIVE,
        tags=tuple(label_tag(key, value) for key, value in sorted(requires.labels.items())),
        device=requires.device,
        precision=requires.precision,
        bits_class=bits_class if bits_class and requires.bits == "same" else None,
    )


def eligible(nodes: Iterable[NodeStatus], query: Resolve, records: Records) -> list[NodeStatus]:
    """The nodes that match, each with those of its slots that do.

    Args:
        nodes: that are registered with the orchestrator.
        query: see `query_of`.
        records: the registry's, by SID. A node whose record has not arrived yet is judged by its slots.
    """
    wanted = {tag for tag in query.tags if is_label_tag(tag)}

    def fits(slot: Slot) -> bool:
        return query.fits(slot) and (
            not wanted or wanted <= {label_tag(key, value) for key, value in slot.labels.items()}
        )

    found = []
    for node in nodes:
        record = records.get(node.sid)
        if record is not None and not query.matches_content(record):
            continue
        slots = tuple(slot for slot in node.slots if fits(slot))
        if len(slots) == len(node.slots):
            if slots or not query.asks_capability:
                found.append(node)
        elif slots:
            found.append(node.model_copy(update={"slots": slots}))
    return found


def bits_classes(nodes: Iterable[NodeStatus]) -> list[str]:
    """The classes of these nodes' slots, that of most speed first; a slot of an older agent has none."""
    speed: defaultdict[str, float] = defaultdict(float)
    for node in nodes:
        for slot in node.slots:
            if slot.bits_class:
                speed[slot.bits_class] += slot.speed.get("stage", 1.0)
    return sorted(speed, key=lambda name: (-speed[name], name))


def class_of(nodes: Iterable[NodeStatus], graph: TaskGraph, spec: JobSpec) -> str:
    """The class of bits of the slots that a plan uses; empty where agents register none, or any will do."""
    if spec.requires.bits == "any":
        return ""
    used = {(place.cluster, place.node) for place in graph.placements}
    slots = {
        (node.cluster, node.node, slot.index): slot.bits_class
        for node in nodes
        if (node.cluster, node.node) in used
        for slot in node.slots
    }
    found = {
        slots.get((place.cluster, place.node, place.slot), "")
        for place in graph.placements
        if place.slot >= 0
    }
    return min(found - {""}, default="")


def plan_in_one_class(
    nodes: Sequence[NodeStatus],
    spec: JobSpec,
    bits_class: str,
    records: Records,
    plan: Callable[[Sequence[NodeStatus]], TaskGraph | NoRoom],
) -> TaskGraph | NoRoom:
    """The plan on eligible slots of one class of bits; without room in any, the reason and the way out.

    Args:
        nodes: all nodes.
        spec: the job.
        bits_class: the one that the job has; empty: it takes the first that has room.
        records: see `eligible`.
        plan: makes a plan on these nodes.
    """
    if why := refusal(nodes, spec, records):
        return NoRoom(why, never=True)
    open_nodes = eligible(nodes, query_of(spec), records)
    if spec.requires.bits == "any":
        return plan(open_nodes)
    present = bits_classes(open_nodes)
    if bits_class and present and bits_class not in present:
        return _no_class(spec, bits_class, present, sure=all(node.warm for node in nodes))
    first: NoRoom | None = None
    classes = [bits_class] if bits_class else present or [""]
    for name in classes:
        planned = plan(eligible(nodes, query_of(spec, name), records))
        if isinstance(planned, TaskGraph):
            return planned
        first = first or planned
    assert first is not None
    others = [name for name in present if name != classes[0]]
    if not others or isinstance(plan(open_nodes), NoRoom):
        return first
    return NoRoom(
        f"{first.reason}; there is room beside devices of {classes[0]}, but with other bits "
        f"({', '.join(others)}): a job with requires.bits: any uses both",
        never=first.never,
    )


def _no_class(spec: JobSpec, bits_class: str, present: Sequence[str], *, sure: bool) -> NoRoom:
    there = f"there are {', '.join(present)}"
    way_out = (
        "a new job goes on from its checkpoints with other bits, if it has resume_from and requires.bits: any"
    )
    if spec.resume_from is None:
        return NoRoom(
            f"no slot has the bits of {bits_class}, in which the job was begun ({there}): waiting for such a "
            f"node; {way_out}"
        )
    return NoRoom(
        f"no slot has the bits of {bits_class}, in which the checkpoint of resume_from was computed "
        f"({there}): join such a node, or set requires.bits: any, to go on with other bits",
        never=sure,
    )


def refusal(nodes: Sequence[NodeStatus], spec: JobSpec, records: Records) -> str:
    """Why no slot of the mesh is what the job requires, in one line; empty: some is, or nobody knows yet."""
    requires, clusters = spec.requires, spec.parallel.clusters
    nodes = [node for node in nodes if not clusters or node.cluster in clusters]
    if not any(node.slots for node in nodes) or not all(node.warm for node in nodes):
        return ""  # they have not registered what they can do
    found = sum(len(node.slots) for node in eligible(nodes, query_of(spec), records))
    if found >= max(1, requires.count):
        return ""
    wanted = [
        *([f"device {requires.device}"] if requires.device else []),
        *([f"precision {requires.precision}"] if requires.precision else []),
        *(f"{key}={value}" for key, value in sorted(requires.labels.items())),
    ]
    if not wanted and not requires.count:
        return ""
    what = " and ".join(wanted) or "any device"
    count = (
        f"{requires.count} slots with {what}, there are {found}"
        if requires.count
        else f"{what}, no slot has it"
    )
    there = "; ".join(sorted({_words(node) for node in nodes if node.slots}))
    return f"requires asks for {count}: {there}"


def _words(node: NodeStatus) -> str:
    kinds = Counter(slot.kind for slot in node.slots)
    precisions = sorted({precision for slot in node.slots for precision in slot.precisions})
    labels = [f"{key}={value}" for key, value in sorted(node.slots[0].labels.items())]
    parts = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    return f"{node.sid} has {', '.join([*parts, *precisions, *labels])}"
