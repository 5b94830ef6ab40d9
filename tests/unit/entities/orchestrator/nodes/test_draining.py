"""What a drain asks for: all of a node, or what runs in one slot of it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from entities.orchestrator.mesh.mesh_view import MeshView
from entities.orchestrator.nodes.cordon_service import clock
from entities.orchestrator.nodes.draining import EMPTY, Draining
from schemas.cluster import Cordon, Departure
from schemas.task_graph import Placement
from tests.builders.graphs import placement
from tests.job_context import job_context


class Run:
    """A job's run, as far as a drain sees it."""

    over = False

    def __init__(self, *placements: Placement) -> None:
        self.asked: list[str] = []
        self.left_s: list[float | None] = []
        self.placements = placements
        members = {one.sid: one for one in placements}
        self.job = job_context(instances=SimpleNamespace(members=members))

    def drain(self, sid: str, left_s: float | None = None) -> str:
        self.asked.append(sid)
        self.left_s.append(left_s)
        return "" if left_s is None else "leaves soon"


def asked(run: Any, slot: int | None, leaves: Departure | None = None, *others: Any) -> str:
    cordon = Cordon(
        agent="a-n",
        cluster="a",
        node="n",
        slot=slot,
        reason="cuda:1: XID 79",
        by="orchestrator",
        at=1.0,
        draining=True,
        leaves=leaves,
    )
    nobody: Any = None  # to ask or to tell
    runs = {str(number): each for number, each in enumerate((run, *others))}
    draining = Draining(nobody, MeshView(), nobody, runs, nobody)
    return draining._ask_next(cordon)


def test_a_broken_devices_slot_is_emptied_and_its_neighbours_stay() -> None:
    run = Run(
        placement("j-s0-r0", 0),
        placement("j-s1-r0", 1),
        placement("j-data-r0", -1),
        placement("j-s1-r1", 1, node="m"),
    )
    assert asked(run, 1) == "1 left; j-s1-r0 is moving"
    assert run.asked == ["j-s1-r0"]


def test_it_is_over_once_its_own_slot_is_empty() -> None:
    assert asked(Run(placement("j-s0-r0", 0), placement("j-data-r0", -1)), 1) == EMPTY


def test_a_whole_node_is_emptied_of_data_instances_too() -> None:
    run = Run(placement("j-data-r0", -1))
    assert asked(run, None) == "1 left; j-data-r0 is moving"


def test_all_of_a_node_that_leaves_are_asked_at_once_and_told_what_time_is_left() -> None:
    run = Run(placement("j-s0-r0", 0), placement("j-data-r0", -1), placement("j-s0-r1", 0, node="m"))
    until = time.time() + 60
    said = asked(run, None, Departure(until=until, incarnation="i", source="cloud"))
    assert run.asked == ["j-s0-r0", "j-data-r0"]
    assert all(left_s is not None and 0 < left_s <= 60 for left_s in run.left_s)
    assert said == f"2 left by {clock(until)}; j-data-r0 leaves soon; j-s0-r0 leaves soon"
    assert asked(Run(), None, Departure(until=until, incarnation="i", source="cloud")) == EMPTY


def test_one_jobs_trouble_keeps_no_others_from_leaving() -> None:
    class Broken(Run):
        def drain(self, sid: str, left_s: float | None = None) -> str:
            raise KeyError("its graph is lost")

    leaves = Departure(until=time.time() + 60, incarnation="i", source="cloud")
    broken, run = Broken(placement("j-s0-r0", 0)), Run(placement("k-s0-r0", 0))
    assert "j-s0-r0 is held up: 'its graph is lost'; k-s0-r0 leaves soon" in asked(broken, None, leaves, run)
    assert run.asked == ["k-s0-r0"]
