"""What a job's section `plan` says of its model's layers, as rules of the planner (ADR-0078). Pure.

Patterns become layers, units of business and of blocks become layers that are apart, places become labels of
slots. A name that nothing has is refused with what there is instead.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import translate

from entities.orchestrator.planning.task_heads import task_units
from entities.planner.layer_rules import CLUSTER, MEMORY, NODE
from entities.planner.plan_request import LayerRule
from schemas.cluster import NodeStatus, Slot
from schemas.errors import BadJob
from schemas.job import JobSpec
from schemas.job_file.plan import PlanConstraint
from schemas.task_graph import ModelTopology

GIB = 2**30


def rules_of(spec: JobSpec, topology: ModelTopology) -> list[LayerRule]:
    """The rules of a job.

    Raises:
        BadJob: a pattern matches no layer; the model has no task heads.
    """
    plan = spec.plan
    names = [layer.name for layer in topology.layers]
    found = [_of(each, names, f"plan.constraints[{at}]") for at, each in enumerate(plan.constraints)]
    for at, patterns in enumerate(plan.shared):
        where = f"plan.shared[{at}]"
        layers = tuple(sorted({layer for each in patterns for layer in matching(each, names, where)}))
        found.append(LayerRule(kind="together", scope="stage", groups=(layers,), name=where))
    labels: dict[int, set[str]] = {}
    for pattern, label in plan.privacy.items():
        where = f"plan.privacy: {pattern}"
        layers = matching(pattern, names, where)
        found.append(LayerRule(kind="pin", groups=(layers,), label=label, name=where))
        for layer in layers:
            labels.setdefault(layer, set()).add(label)
    if plan.by == "business":
        units = task_units(topology)
        groups = tuple(unit.layers for unit in units)
        found.append(LayerRule(kind="apart", scope="stage", groups=groups, name="plan.by: business"))
        heads = [unit for unit in units if unit.is_head and len(unit.layers) > 1]
        found += [
            LayerRule(
                kind="together", scope="stage", groups=(head.layers,), name=f"plan.by: business ({head.name})"
            )
            for head in heads
        ]
    elif plan.by == "block":
        blocks: dict[frozenset[str], list[int]] = {}
        for layer in range(len(names)):
            blocks.setdefault(frozenset(labels.get(layer, ())), []).append(layer)
        groups = tuple(map(tuple, blocks.values()))
        found.append(LayerRule(kind="apart", scope="stage", groups=groups, name="plan.by: block"))
    return found


def kept_edges(
    spec: JobSpec, topology: ModelTopology, edges: Sequence[int], stages: int | None
) -> tuple[int, ...]:
    """The edges that a job's plan leaves: those of its `cuts`, if it keeps a plan, else all but tabu ones.

    Args:
        spec: the job.
        topology: its analysed model.
        edges: where its model may be cut.
        stages: that there will be; None: the planner chooses.

    Raises:
        BadJob: the kept plan is of another model, or has other stages than the job.
    """
    plan = spec.plan
    names = [layer.name for layer in topology.layers]
    if plan.cuts is None:
        tabu = {layer for each in plan.tabu.begin for layer in matching(each, names, "plan.tabu.begin")}
        left = tuple(edge for edge in edges if edge not in tabu or edge == 0)
        if stages is not None and stages > len(left) - 1:
            raise BadJob(
                f"parallel.stages is {stages}, but plan.tabu.begin leaves {len(left) - 1} parts to be cut: "
                f"set parallel.stages to at most {len(left) - 1}, or take layers out of it"
            )
        return left
    digest = model_digest(topology)
    if plan.model is not None and plan.model != digest:
        raise BadJob(
            f"plan.cuts is of another model: of {plan.model}, and this one is {digest} ({len(names)} "
            "layers): plan this one with dmsc plan --out, or take cuts and model out"
        )
    if unknown := [name for name in plan.cuts if name not in names]:
        raise BadJob(
            f"plan.cuts is of another model: no layer is called {unknown[0]}{_near(unknown[0], names)}: "
            "plan this one with dmsc plan --out"
        )
    kept = [0, *(names.index(name) for name in plan.cuts), len(names)]
    if kept != sorted(set(kept)):
        raise BadJob("plan.cuts is not in the model's order, or begins with its first layer: plan it anew")
    if closed := [names[edge] for edge in kept if edge not in edges]:
        raise BadJob(
            f"plan.cuts cuts in front of {closed[0]}, which changes in place what another layer made: plan "
            "it anew"
        )
    if stages is not None and stages != len(kept) - 1:
        raise BadJob(
            f"plan.cuts makes {len(kept) - 1} stages, but parallel.stages is {stages}: set it to "
            f"{len(kept) - 1}"
        )
    return tuple(kept)


def matching(pattern: str, names: Sequence[str], where: str) -> tuple[int, ...]:
    """The layers that a pattern names: by their names, or by those of modules that they are part of.

    Raises:
        BadJob: there is none.
    """
    matches = re.compile(translate(pattern)).match
    found = tuple(at for at, name in enumerate(names) if matches(name) or name.startswith(f"{pattern}."))
    if not found:
        shown = ", ".join(names[:6]) + (f" … ({len(names)} in all)" if len(names) > 6 else "")
        raise BadJob(f"{where}: no layer matches {pattern}{_near(pattern, names)}: the model has {shown}")
    return found


def model_digest(topology: ModelTopology) -> str:
    """What a kept plan is for: the layers by name, kind and number of parameters. 16 hexadecimal digits."""
    lines = "\n".join(f"{layer.name} {layer.kind} {layer.parameters}" for layer in topology.layers)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def pinned_together(rules: Iterable[LayerRule]) -> set[frozenset[str]]:
    """The labels that some layer demands of one slot, for each layer with hard pins."""
    labels: dict[int, set[str]] = {}
    for rule in rules:
        if rule.kind == "pin" and rule.hard:
            for layer in rule.layers:
                labels.setdefault(layer, set()).add(rule.label)
    return {frozenset(mine) for mine in labels.values()}


def labels_for(node: NodeStatus, slot: Slot, wanted: Iterable[str]) -> tuple[str, ...]:
    """Which of these labels a slot has, ascending. Others do not matter, and slots that differ in them are
    alike."""
    own = {f"{key}={value}" for key, value in slot.labels.items()}
    own |= {f"{NODE}{node.node}", f"{CLUSTER}{node.cluster}"}
    return tuple(
        sorted(
            label
            for label in set(wanted)
            if label in own
            or (
                label.startswith(MEMORY)
                and (not slot.memory_bytes or slot.memory_bytes >= int(label[len(MEMORY) :]))
            )
        )
    )


def open_to(spec: JobSpec, nodes: Iterable[NodeStatus]) -> list[NodeStatus]:
    """The nodes that `plan.tabu` leaves, each with the slots that it leaves."""
    tabu = spec.plan.tabu
    if not (tabu.nodes or tabu.clusters or tabu.labels):
        return [*nodes]
    closed = set(tabu.labels)
    return [
        node.model_copy(
            update={
                "slots": tuple(
                    slot
                    for slot in node.slots
                    if closed.isdisjoint(f"{key}={value}" for key, value in slot.labels.items())
                )
            }
        )
        for node in nodes
        if node.node not in tabu.nodes and node.cluster not in tabu.clusters
    ]


def _of(constraint: PlanConstraint, names: Sequence[str], where: str) -> LayerRule:
    name = f"{where} ({constraint.kind})"
    groups = [matching(pattern, names, where) for pattern in constraint.layers]
    if constraint.kind not in ("apart", "order"):
        groups = [tuple(sorted({layer for group in groups for layer in group}))]
    label = constraint.label or ""
    if constraint.node is not None:
        label = f"{NODE}{constraint.node}"
    elif constraint.cluster is not None:
        label = f"{CLUSTER}{constraint.cluster}"
    elif constraint.gib is not None:
        label = f"{MEMORY}{int(constraint.gib * GIB)}"
    kind = "pin" if constraint.kind == "memory" else constraint.kind
    return LayerRule(
        kind=kind, groups=tuple(groups), scope=constraint.of, label=label, hard=constraint.hard, name=name
    )


def _near(pattern: str, names: Sequence[str]) -> str:
    close = get_close_matches(pattern, names, 1, 0.6)
    return f" (did you mean {close[0]}?)" if close else ""
