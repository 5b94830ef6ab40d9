"""More and fewer replicas, and when standbys work."""

from __future__ import annotations

import pytest

from entities.orchestrator.planning.scaling import (
    added_replicas,
    removed_replicas,
    standby_weights,
    with_units,
    without_units,
)
from schemas.errors import BadInput
from schemas.task_graph import TaskUnit
from tests.builders.graphs import graph, placement, unit


def replica(stage: int, number: int, *, standby: bool = False) -> TaskUnit:
    tags = ("job:j", f"stage:{stage}", f"replica:{number}")
    return unit(f"j-s{stage}-r{number}", tags=tags, standby=standby)


GRAPH = graph(replica(0, 0), replica(0, 1, standby=True), replica(1, 0), replica(1, 1))


def test_added_replicas_take_free_numbers_and_count_no_standby() -> None:
    added = added_replicas(GRAPH, 0, 3)
    assert [one.sid for one in added] == ["j-s0-r2", "j-s0-r3"]
    assert added[0].tags == ("job:j", "stage:0", "replica:2")
    assert not added[0].standby
    assert added_replicas(GRAPH, 1, 2) == ()
    grown = with_units(GRAPH, added)
    assert [one.sid for one in grown.stage(0)] == ["j-s0-r0", "j-s0-r1", "j-s0-r2", "j-s0-r3"]


def test_the_last_that_came_leave_and_one_stays() -> None:
    assert [one.sid for one in removed_replicas(GRAPH, 1, 1)] == ["j-s1-r1"]
    assert removed_replicas(GRAPH, 0, 1) == ()
    with pytest.raises(BadInput, match="at least 1 replica"):
        removed_replicas(GRAPH, 1, 0)
    with pytest.raises(BadInput, match="there is no stage 7"):
        added_replicas(GRAPH, 7, 2)


def test_what_left_has_no_place_any_more() -> None:
    placed = GRAPH.model_copy(update={"placements": (placement("j-s1-r1"),)})
    left = without_units(placed, {"j-s1-r1"})
    assert [one.sid for one in left.stage(1)] == ["j-s1-r0"]
    assert left.placements == ()


def test_a_standby_works_while_no_other_replica_lives() -> None:
    rests = {0: {"j-s0-r0": 1.0, "j-s0-r1": 0.0}}
    everyone = {"j-s0-r0", "j-s0-r1", "j-s1-r0", "j-s1-r1"}
    assert standby_weights(GRAPH, rests, everyone) == {}
    works = standby_weights(GRAPH, rests, everyone - {"j-s0-r0"})
    assert works == {0: {"j-s0-r0": 1.0, "j-s0-r1": 1.0}}
    assert standby_weights(GRAPH, works, everyone) == rests
