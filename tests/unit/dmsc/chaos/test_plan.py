"""The plan: the same seed, the same faults; victims only from what is alive."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsc.chaos.plan import (
    Alive,
    Every,
    FaultKind,
    LiveInstance,
    MeshProcess,
    PlannedFault,
    candidates,
    choose,
    parse_every,
    parse_kinds,
    plan,
)
from schemas.errors import BadInput

SECONDS = Every(seconds=10.0)


def instance(sid: str, stage: int, cluster: str, pid: int, *, standby: bool = False) -> LiveInstance:
    return LiveInstance(
        sid=sid, incarnation=f"i{pid}", stage=stage, cluster=cluster, pid=pid, started=1.0, standby=standby
    )


def part(
    name: str, entities: tuple[str, ...], clusters: tuple[str, ...], pid: int, *tree: int
) -> MeshProcess:
    return MeshProcess(
        name=name,
        entities=entities,
        clusters=clusters,
        pid=pid,
        started=1.0,
        tree=tuple((each, 1.0) for each in tree),
    )


INSTANCES = (
    instance("j-s0-r0", 0, "a", 11),
    instance("j-s0-r1", 0, "b", 21),
    instance("j-s1-r0", 1, "b", 22),
    instance("j-data-r0", -1, "a", 12),
)
AGENTS = (
    part("agent-a", ("agent",), ("a",), 1, 10, 11, 12),
    part("agent-b", ("agent",), ("b",), 2, 20, 21, 22),
)
SERVER = part("nats-server", ("server",), (), 3)
SHARED = part("control-plane", ("service-registry", "orchestrator", "router", "gateway"), ("a", "b"), 4)
APART = (
    part("orchestrator", ("orchestrator",), (), 5),
    part("service-registry", ("service-registry",), (), 6),
    part("router-a", ("router",), ("a",), 7),
    part("gateway-a", ("gateway",), ("a",), 8),
)


def planned(kind: FaultKind, pick: float = 0.0) -> PlannedFault:
    return PlannedFault(number=0, kind=kind, due=10.0, offset=0.5, pick=pick)


def pids(kind: FaultKind, alive: Alive) -> list[list[int]]:
    return [[pid for pid, _ in target.processes] for target in candidates(kind, alive)]


def test_the_same_seed_gives_the_same_plan_and_another_seed_another_one() -> None:
    kinds = tuple(FaultKind)
    first = list(islice(plan(7, SECONDS, kinds), 50))
    assert first == list(islice(plan(7, SECONDS, kinds), 50))
    assert first != list(islice(plan(8, SECONDS, kinds), 50))


@given(
    seed=st.integers(0, 1 << 32), kinds=st.lists(st.sampled_from(list(FaultKind)), min_size=1, unique=True)
)
def test_every_kind_comes_once_before_any_comes_again(seed: int, kinds: list[FaultKind]) -> None:
    rounds = list(islice(plan(seed, SECONDS, kinds), 3 * len(kinds)))
    for number in range(3):
        found = {one.kind for one in rounds[number * len(kinds) : (number + 1) * len(kinds)]}
        assert found == set(kinds)
    assert [one.due for one in rounds] == [10.0 * (index + 1) for index in range(len(rounds))]
    assert all(0 <= one.offset < 1 and 0 <= one.pick < 1 for one in rounds)


def test_the_offsets_hit_all_phases_of_a_step() -> None:
    offsets = [one.offset for one in islice(plan(0, SECONDS, [FaultKind.INSTANCE]), 200)]
    assert {int(10 * offset) for offset in offsets} == set(range(10))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("10s", Every(seconds=10.0)),
        ("500ms", Every(seconds=0.5)),
        ("2min", Every(seconds=120.0)),
        ("20steps", Every(steps=20)),
        ("1step", Every(steps=1)),
    ],
)
def test_intervals_in_seconds_and_in_steps(text: str, wanted: Every) -> None:
    assert parse_every(text) == wanted


@pytest.mark.parametrize("text", ["", "10", "0s", "-1s", "1.5steps", "10 parsecs"])
def test_an_interval_that_is_none_is_refused_with_what_would_be_one(text: str) -> None:
    with pytest.raises(BadInput, match="--every"):
        parse_every(text)


def test_kinds_are_named_once_and_unknown_ones_are_refused() -> None:
    assert parse_kinds("instance, server,instance") == (FaultKind.INSTANCE, FaultKind.SERVER)
    with pytest.raises(BadInput, match="meteor is no fault; there are instance"):
        parse_kinds("instance,meteor")
    with pytest.raises(BadInput, match="nothing is no fault"):
        parse_kinds(" , ")


def test_instances_are_picked_by_the_number_that_was_drawn() -> None:
    alive = Alive(instances=INSTANCES)
    names = [target.name for target in candidates(FaultKind.INSTANCE, alive)]
    assert names == ["j-data-r0", "j-s0-r0", "j-s0-r1", "j-s1-r0"]
    assert [choose(planned(FaultKind.FREEZE, pick), alive).name for pick in (0.0, 0.3, 0.99)] == [
        "j-data-r0",
        "j-s0-r0",
        "j-s1-r0",
    ]


def test_a_stage_is_all_its_replicas_and_never_the_data() -> None:
    assert pids(FaultKind.STAGE, Alive(instances=INSTANCES)) == [[11, 21], [22]]


def test_a_stage_loses_its_replicas_and_keeps_its_standbys_unless_they_are_named() -> None:
    alive = Alive(instances=(*INSTANCES, instance("j-s1-r1", 1, "a", 13, standby=True)))
    assert pids(FaultKind.STAGE, alive) == [[11, 21], [22]]
    assert pids(FaultKind.WHOLE_STAGE, alive) == [[11, 21], [22, 13]]
    left = Alive(instances=(instance("j-s1-r1", 1, "a", 13, standby=True),))
    assert pids(FaultKind.STAGE, left) == []


def test_notice_is_given_to_agents_that_have_work_and_says_who_is_alone_in_a_stage() -> None:
    idle = part("agent-c", ("agent",), ("c",), 9, 90)
    first, second = candidates(FaultKind.NOTICE, Alive(instances=INSTANCES, parts=(*AGENTS, idle, SERVER)))
    assert [target.name for target in (first, second)] == [
        "agent-a (j-data-r0, j-s0-r0)",
        "agent-b (j-s0-r1, j-s1-r0)",
    ]
    assert [target.processes for target in (first, second)] == [((1, 1.0),), ((2, 1.0),)]
    assert [target.sole for target in (first, second)] == [(), ("j-s1-r0",)]
    assert first.instances == second.instances == (), "nobody's work is destroyed"


def test_a_cluster_is_its_agents_with_all_that_they_started_its_router_and_its_gateway() -> None:
    alive = Alive(instances=INSTANCES, parts=(*AGENTS, SERVER, *APART))
    target = choose(planned(FaultKind.CLUSTER), alive)
    assert target is not None
    assert [pid for pid, _ in target.processes] == [1, 7, 8, 10, 11, 12]
    assert {one.sid for one in target.instances} == {"j-s0-r0", "j-data-r0"}


def test_a_control_plane_that_is_one_process_survives_the_end_of_a_cluster() -> None:
    alive = Alive(instances=INSTANCES, parts=(*AGENTS, SERVER, SHARED))
    assert pids(FaultKind.CLUSTER, alive) == [[1, 10, 11, 12], [2, 20, 21, 22]]
    target = choose(planned(FaultKind.CLUSTER), alive)
    assert target is not None
    assert "control-plane, which stays" in target.name
    alone = Alive(parts=(AGENTS[0], part("control-plane", SHARED.entities, ("a",), 4)))
    assert pids(FaultKind.CLUSTER, alone) == [[1, 10, 11, 12]]


@pytest.mark.parametrize(
    ("kind", "shared", "apart"),
    [
        (FaultKind.ORCHESTRATOR, [[4]], [[5]]),
        (FaultKind.REGISTRY, [[4]], [[6]]),
        (FaultKind.ROUTER, [[4]], [[7]]),
        (FaultKind.GATEWAY, [[4]], [[8]]),
        (FaultKind.SERVER, [[3]], [[3]]),
    ],
)
def test_an_entity_is_the_process_that_runs_it(
    kind: FaultKind, shared: list[list[int]], apart: list[list[int]]
) -> None:
    assert pids(kind, Alive(parts=(*AGENTS, SERVER, SHARED))) == shared
    assert pids(kind, Alive(parts=(*AGENTS, SERVER, *APART))) == apart


@pytest.mark.parametrize("kind", list(FaultKind))
def test_where_nobody_is_alive_nobody_is_hit(kind: FaultKind) -> None:
    assert choose(planned(kind, 0.9), Alive()) is None
