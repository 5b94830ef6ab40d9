"""Whose turn it is, of jobs that wait for room."""

from __future__ import annotations

from typing import Any

from entities.orchestrator.queue.job_queue import Waiting, emptied, free_by_cluster, turn
from tests.builders.graphs import node, placement


def waiting(job: str, slots: int, at: float, **more: Any) -> Waiting:
    fields: dict[str, Any] = {"clusters": (), "parked": False, "fits": True} | more
    return Waiting(job=job, slots=slots, submitted_at=at, **fields)


def test_small_ones_do_not_overtake_a_large_one() -> None:
    large, small = waiting("large", 6, 1.0), [waiting(f"small{n}", 1, 2.0 + n) for n in range(6)]
    line = [*small, large]
    for free in range(6):
        for one in small:
            assert turn(one, line, {"a": free}).startswith("behind large")
        assert turn(large, line, {"a": free}) == ""
    assert turn(small[0], line, {"a": 7}) == ""  # large keeps what it needs
    assert turn(small[1], line, {"a": 7}).startswith("behind large and 1 more")


def test_a_parked_job_precedes_those_that_never_started() -> None:
    parked, first = waiting("parked", 4, 9.0, parked=True), waiting("first", 4, 1.0)
    assert turn(first, [parked, first], {"a": 4}).startswith("behind parked, which came first and needs 4")
    assert turn(parked, [parked, first], {"a": 4}) == ""


def test_one_that_can_never_fit_holds_nobody_up() -> None:
    huge, small = waiting("huge", 64, 1.0, fits=False), waiting("small", 1, 2.0)
    assert turn(small, [huge, small], {"a": 1}) == ""


def test_jobs_of_other_clusters_are_no_rivals() -> None:
    east, west = waiting("east", 4, 1.0, clusters=("east",)), waiting("west", 1, 2.0, clusters=("west",))
    assert turn(west, [east, west], {"east": 0, "west": 1}) == ""
    anywhere = waiting("anywhere", 1, 3.0)
    assert turn(anywhere, [east, anywhere], {"east": 0, "west": 1}).startswith("behind east")


def test_free_by_cluster_are_neither_busy_nor_promised_nor_cordoned() -> None:
    nodes = [node("a", slots=3, busy=1), node("b")]
    promised = {"a-n": [placement("k-s0-r0", 1)]}
    assert free_by_cluster(nodes, promised, {"b-n": {1}}) == {"a": 1, "b": 1}
    assert free_by_cluster(nodes, {}, {"b-n": {None}}) == {"a": 2, "b": 0}
    assert free_by_cluster(emptied(nodes), {}, {}) == {"a": 3, "b": 2}
