"""Whole plans: searched, made at once, refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from entities.planner.network_topology import dragonfly
from entities.planner.plan_at_once import is_small, plan_at_once
from entities.planner.plan_request import (
    LayerRule,
    NoPlan,
    PlanAnswer,
    PlanLayer,
    PlanRequest,
    PlanSlot,
    SearchFailed,
)
from entities.planner.planning_process import PlanningConfig, searched, searched_with_less
from entities.planner.search.plan_search import search_plan

GIB = 2**30


def request(**changes: Any) -> PlanRequest:
    layers = tuple(PlanLayer(f"layer-{at}", 1.0 + at % 5, 1e8, 1e6, 1e6, 1e5) for at in range(12))
    slots = tuple(PlanSlot(f"node-{at // 2}", f"cluster-{at // 2 % 2}", at % 2, 8 * GIB) for at in range(8))
    asked = PlanRequest(
        layers=layers,
        slots=slots,
        clusters=("cluster-0", "cluster-1"),
        microbatches=16,
        stages=2,
        replicas=(2, 2),
    )
    return replace(asked, **changes)


def test_requests_and_answers_survive_their_way_between_processes() -> None:
    asked = request(rules=(LayerRule(kind="spread", groups=((0, 11),), scope="cluster"),))
    assert PlanRequest.from_json(asked.to_json()) == asked
    answer = search_plan(asked)
    assert PlanAnswer.from_json(answer.to_json()) == answer


def test_a_small_plan_made_at_once_is_the_searched_one() -> None:
    asked = request()
    at_once, searched = plan_at_once(asked), search_plan(asked)
    assert is_small(asked)
    assert at_once.forecast.step_ms == pytest.approx(searched.forecast.step_ms)
    assert at_once.places == searched.places
    assert not is_small(request(replicas=None))
    assert not is_small(request(slots=(*request().slots, PlanSlot("node-9", "cluster-0", 0, GIB, 2.0))))


def test_a_plan_that_may_choose_is_no_longer_than_one_that_may_not() -> None:
    given = search_plan(request())
    chosen = search_plan(request(stages=None, replicas=None))
    assert chosen.forecast.step_ms <= given.forecast.step_ms
    assert len(chosen.alternatives) == 3
    assert all(other.why_not for other in chosen.alternatives)


def test_unequal_slots_are_used_for_what_they_can() -> None:
    speeds = (1.0, 1.0, 2.0, 2.0, 4.0)
    slots = tuple(
        PlanSlot(f"node-{at}", "cluster-0", 0, GIB if at else GIB // 2, speed)
        for at, speed in enumerate(speeds)
    )
    answer = search_plan(request(slots=slots, stages=2, replicas=None, clusters=("cluster-0",)))
    blind = plan_at_once(request(slots=slots[1:], stages=2, replicas=(2, 2), clusters=("cluster-0",)))
    assert answer.forecast.step_ms < blind.forecast.step_ms / 1.3
    for place in answer.places:
        assert answer.forecast.memory_bytes[place.stage] <= slots[place.slot].memory_bytes


def test_standbys_get_slots_that_could_hold_their_stage() -> None:
    answer = search_plan(request(standbys=(1, 1), replicas=(1, 1)))
    assert [(place.stage, place.replica) for place in answer.places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert len({place.slot for place in answer.places}) == 4


def test_a_topology_moves_units_near_to_each_other() -> None:
    topology = dragonfly(3, 2, 2)
    asked = request(
        slots=tuple(PlanSlot(host, "cluster-0", 0, host=host) for host in topology.hosts),
        clusters=("cluster-0",),
        replicas=(4, 4),
        hosts=topology.hosts,
        links=tuple((first, second, speed) for (first, second), speed in topology.links.items()),
    )
    answer = search_plan(asked)
    assert answer.forecast.busiest_link_ms > 0
    assert search_plan(asked) == answer
    with pytest.raises(NoPlan, match="does not have host-0"):
        search_plan(replace(asked, hosts=topology.hosts[1:]))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"slots": ()}, "no slot is free"),
        ({"replicas": (5, 5)}, "needs 10 slots, 8 are free"),
        ({"stages": 13, "replicas": None, "slots": request().slots * 2}, "can be cut into 12"),
        ({"layers": ()}, "no layers"),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(changes: dict[str, object], refusal: str) -> None:
    with pytest.raises(NoPlan, match=refusal):
        search_plan(request(**changes))


def test_memory_that_is_not_known_is_not_what_stands_against_a_plan() -> None:
    layers = list(request().layers)
    layers[0] = replace(layers[0], pinned_to=("disk=fast",))
    layers[1] = replace(layers[1], pinned_to=("disk=slow",))
    slots = tuple(
        PlanSlot("node", "cluster-0", at, labels=(f"disk={kind}",)) for at, kind in ((0, "fast"), (1, "slow"))
    )
    asked = request(layers=tuple(layers), slots=slots, edges=(0, 6, 12), replicas=None)
    with pytest.raises(NoPlan, match="no cut into 2 stages keeps all constraints on the 2 free slots"):
        search_plan(asked)


def test_a_layer_that_fits_nowhere_is_named_with_what_is_missing() -> None:
    layers = request().layers
    large = (*layers[:3], replace(layers[3], state_bytes=16.0 * GIB), *layers[4:])
    with pytest.raises(NoPlan, match=r"layer layer-3 alone needs 16 GiB, the largest slot has 8 GiB"):
        search_plan(request(layers=large))
    with pytest.raises(NoPlan, match=r"stage \d needs 1\d(\.\d)? GiB in each instance, the largest slot"):
        plan_at_once(request(layers=large))


async def test_a_search_in_its_process_is_the_search() -> None:
    asked = request(stages=None, replicas=None)
    assert await searched(asked) == search_plan(asked)
    with pytest.raises(NoPlan, match="no slot is free") as refused:
        await searched(request(slots=()))
    assert not refused.value.never


async def test_a_search_that_exceeds_its_deadline_leaves_the_plan_made_at_once() -> None:
    answer = await searched(request(), PlanningConfig(deadline_s=0.0))
    assert answer.places == plan_at_once(request()).places
    assert "the search exceeded its 0 s" in answer.reason


async def test_a_search_whose_process_dies_leaves_the_plan_made_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    answer = await searched(request())
    assert answer.places == plan_at_once(request()).places
    assert "the search's process ended with code 1" in answer.reason


@pytest.mark.parametrize(
    ("program", "why"),
    [("/no/such/python", "does not start: No such file"), ("/bin/echo", "can't be read")],
)
async def test_a_search_that_does_not_begin_or_ends_otherwise_leaves_the_plan_made_at_once(
    monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    answer = await searched(request())
    assert answer.places == plan_at_once(request()).places
    assert why in answer.reason


async def test_a_late_search_says_so_where_nothing_is_planned_at_once() -> None:
    rule = LayerRule(kind="together", groups=(tuple(range(12)),), name="the together")
    asked = request(rules=(rule,), replicas=(1, 1))
    with pytest.raises(SearchFailed, match=r"the together, which .* \(the search exceeded its 0 s\)") as late:
        await searched(asked, PlanningConfig(deadline_s=0.0))
    assert not late.value.never
    with pytest.raises(SearchFailed):
        await searched_with_less(asked, PlanningConfig(deadline_s=0.0))


def test_others_that_do_not_fit_have_no_step() -> None:
    small = tuple(replace(slot, memory_bytes=int(0.8 * GIB)) for slot in request().slots)
    for answer in (
        plan_at_once(request(slots=small, replicas=(1, 1))),
        search_plan(request(slots=small, replicas=(1, 1))),
    ):
        assert all(other.step_ms is None or 0 < other.step_ms < 1e6 for other in answer.alternatives)
    at_once = plan_at_once(request(slots=small, replicas=(1, 1)))
    assert next((other.plan, other.step_ms) for other in at_once.alternatives) == (
        "1 stage of 2 instances in all",
        None,
    )
    assert PlanAnswer.from_json(at_once.to_json()) == at_once


def test_where_not_all_in_flight_fits_what_is_certainly_needed_does() -> None:
    layers = tuple(replace(layer, activation_bytes=1.0 * GIB) for layer in request().layers)
    with pytest.raises(NoPlan):
        plan_at_once(request(layers=layers))
    answer = plan_at_once(request(layers=layers).relaxed())
    assert max(answer.forecast.memory_bytes) <= 8 * GIB
