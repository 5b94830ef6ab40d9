"""What a job's owner says of places, for as long as the job lives: replacements, growth and moves keep it.
Pure.

The plan keeps hard rules when the job starts (`entities.planner`). Its task graph remembers them by stages,
so that whatever instances a stage has later go where the rules allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from entities.orchestrator.planning.plan_rules import labels_for
from entities.planner.layer_rules import MEMORY, in_words
from entities.planner.plan_request import LayerRule
from schemas.cluster import NodeStatus
from schemas.task_graph import Constraint, Placement, TaskGraph, TaskUnit, UnitKind


def owners_constraints(
    rules: Iterable[LayerRule], cuts: Sequence[tuple[int, int]], units: Sequence[TaskUnit]
) -> list[Constraint]:
    """The rules on places, of the stages that a plan makes of their layers."""
    found = []
    for rule in rules:
        groups = tuple(
            tuple(
                stage
                for stage, (first, last) in enumerate(cuts)
                if not set(group).isdisjoint(range(first, last))
            )
            for group in rule.groups
        )
        stages = {stage for group in groups for stage in group}
        found.append(
            Constraint(
                kind=rule.kind,
                sids=tuple(
                    unit.sid for unit in units if unit.kind is UnitKind.STAGE and unit.stage in stages
                ),
                reason=rule.shown,
                scope=rule.scope,
                stages=groups,
                label=rule.label,
                hard=rule.hard,
            )
        )
    return found


def has_rules(graph: TaskGraph) -> bool:
    """Whether places of its instances depend on each other."""
    return any(rule.hard and rule.stages for rule in graph.constraints)


def nodes_for(
    graph: TaskGraph, unit: TaskUnit, nodes: Iterable[NodeStatus], others: Iterable[Placement]
) -> list[NodeStatus] | str:
    """The nodes where a unit may run beside the other instances of its job, or the rule that leaves none.

    Args:
        graph: the job's.
        unit: it need not be in the graph yet.
        nodes: those that are asked about.
        others: where the others run, data units too.
    """
    stage_of = {other.sid: other.stage for other in graph.units if other.kind is UnitKind.STAGE}
    placed = [
        (stage_of[other.sid], other) for other in others if other.sid in stage_of and other.sid != unit.sid
    ]
    left = [*nodes]
    if unit.kind is not UnitKind.STAGE:
        return left
    for rule in graph.constraints:
        mine = [group for group in rule.stages if unit.stage in group]
        if not rule.hard or not mine:
            continue
        theirs = {
            "spread": {unit.stage},
            "together": set(mine[0]),
            "apart": {stage for group in rule.stages if group not in mine for stage in group},
        }.get(rule.kind, set())
        beside = {_place(other, rule.scope) for stage, other in placed if stage in theirs}
        wants = rule.kind == "together"
        if beside or not wants:
            left = [node for node in left if (_of(node, rule.scope) in beside) is wants]
        if not left:
            return rule.reason
    return left


def unfit_for(graph: TaskGraph, stage: int, sid: str, node: NodeStatus | None) -> str:
    """Why the slot of an instance may not host one of another stage; empty if it may."""
    wanted = graph.stage(stage)[0].requirements.labels
    where = graph.placement(sid)
    if wanted:
        slot = node.slot(where.slot) if node else None
        have = labels_for(node, slot, wanted) if node is not None and slot is not None else ()
        if missing := [label for label in wanted if label not in have]:
            return f"stage {stage} is pinned to {in_words(missing[0])}"
    if node is not None and has_rules(graph):
        others = [place for place in graph.placements if place.sid != sid]
        found = nodes_for(graph, graph.stage(stage)[0].model_copy(update={"sid": sid}), [node], others)
        if isinstance(found, str):
            return f"{found} forbids it"
    return ""


def may_lie(graph: TaskGraph, stage: int, node: NodeStatus | None) -> bool:
    """Whether a copy of a stage's state may lie on a node: its layers are pinned to slots like that node's.

    What memory a slot must have is a matter of who computes.
    """
    wanted = {label for label in graph.stage(stage)[0].requirements.labels if not label.startswith(MEMORY)}
    if not wanted:
        return True
    return node is not None and any(wanted == {*labels_for(node, slot, wanted)} for slot in node.slots)


def _place(placement: Placement, scope: str) -> str:
    return placement.cluster if scope == "cluster" else f"{placement.cluster}/{placement.node}"


def _of(node: NodeStatus, scope: str) -> str:
    return node.cluster if scope == "cluster" else f"{node.cluster}/{node.node}"
