"""More or fewer replicas of a stage while the job runs, and the route weights of standbys. Pure.

A step has the same microbatches with any number of workers, so neither changes the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from schemas.errors import BadInput
from schemas.task_graph import TaskGraph, TaskUnit, UnitKind


def added_replicas(graph: TaskGraph, stage: int, replicas: int) -> tuple[TaskUnit, ...]:
    """The units to add so that the stage has `replicas` working ones; standbys are not counted."""
    working = _working(graph, stage)
    taken = {unit.replica for unit in graph.stage(stage)}
    numbers = (number for number in range(len(taken) + replicas) if number not in taken)
    return tuple(_another(working[0], next(numbers)) for _ in range(max(0, replicas - len(working))))


def removed_replicas(
    graph: TaskGraph, stage: int, replicas: int, first: Collection[str] = ()
) -> tuple[TaskUnit, ...]:
    """The units to remove so that the stage has `replicas` working ones: those of `first`, then the latest.

    Raises:
        BadInput: a stage needs at least one.
    """
    if replicas < 1:
        raise BadInput(f"a stage needs at least 1 replica, not {replicas}; `dmsc cancel` ends a job")
    working = _working(graph, stage)
    return tuple(sorted(working, key=lambda unit: unit.sid in first)[replicas:])


def working_units(graph: TaskGraph) -> frozenset[str]:
    """The SIDs of the stages' working replicas."""
    return frozenset(unit.sid for unit in graph.units if unit.kind is UnitKind.STAGE and not unit.standby)


def with_units(graph: TaskGraph, added: tuple[TaskUnit, ...]) -> TaskGraph:
    return graph.model_copy(update={"units": (*graph.units, *added)})


def without_units(graph: TaskGraph, sids: Set[str]) -> TaskGraph:
    """The graph without these units and their placements."""
    return graph.model_copy(
        update={
            "units": tuple(unit for unit in graph.units if unit.sid not in sids),
            "placements": tuple(place for place in graph.placements if place.sid not in sids),
        }
    )


def standby_weights(
    graph: TaskGraph,
    present: Mapping[int, Mapping[str, float]],
    living: Set[str],
    backups: Collection[str] = (),
) -> dict[int, dict[str, float]]:
    """Route weights of stages where standbys must work now, or may rest again.

    Args:
        graph: the job's units.
        present: weights by stage and SID, as the routers have them.
        living: SIDs with the state of the open step.
        backups: SIDs that others' shares are sent to: those keep their weights where nobody else is needed.

    Returns:
        All weights of each stage that changes: its standbys work (1) while no other replica lives, and
        have weight 0 otherwise.
    """
    changed = {}
    for stage in {unit.stage for unit in graph.units if unit.standby}:
        units = graph.stage(stage)
        needed = not any(unit.sid in living for unit in units if not unit.standby)
        weights = {unit.sid: float(needed) for unit in units if unit.standby}
        before = present.get(stage, {})
        if not needed:
            weights |= {sid: before[sid] for sid in weights.keys() & before.keys() & set(backups)}
        if any(before.get(sid, 1.0) != weight for sid, weight in weights.items()):
            changed[stage] = {**before, **weights}
    return changed


def _working(graph: TaskGraph, stage: int) -> tuple[TaskUnit, ...]:
    working = tuple(unit for unit in graph.stage(stage) if not unit.standby)
    if not working:
        raise BadInput(f"there is no stage {stage}; `dmsc jobs` shows the stages of a job")
    return working


def _another(like: TaskUnit, replica: int) -> TaskUnit:
    head, _, _ = like.sid.rpartition("-")
    tags = tuple(tag for tag in like.tags if not tag.startswith("replica:"))
    return like.model_copy(
        update={"sid": f"{head}-r{replica}", "replica": replica, "tags": (*tags, f"replica:{replica}")}
    )
