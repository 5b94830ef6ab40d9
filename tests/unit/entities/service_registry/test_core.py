"""The registry's decisions: leases, incarnations, transitions, route ids, resolution by content."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from entities.service_registry.content_index import RouteIds
from entities.service_registry.core import RegistrationLeaseConfig, RegistryCore
from schemas.envelope import EntityKind
from schemas.errors import BadMessage, Fenced, IllegalTransition, NotFound
from schemas.registry import (
    INSTANCE_TRANSITIONS,
    Capability,
    Heartbeat,
    InstanceState,
    Resolve,
    StateChange,
    TensorSchema,
)
from tests.builders.records import instance, service

S = InstanceState


@pytest.fixture
def core() -> RegistryCore:
    return RegistryCore(RegistrationLeaseConfig())


def beat(sid: str = "j-s0-r0", incarnation: str = "i1", state: S = S.ACTIVE) -> Heartbeat:
    return Heartbeat(sid=sid, incarnation=incarnation, state=state)


def change(state: S, sid: str = "j-s0-r0", incarnation: str = "i1", reason: str = "") -> StateChange:
    return StateChange(sid=sid, incarnation=incarnation, state=state, reason=reason)


def state_of(core: RegistryCore, sid: str = "j-s0-r0") -> S | None:
    record = core.record(sid)
    return record.state if record else None


def run_ticks(core: RegistryCore, start: float, end: float, step: float = 0.5) -> set[str]:
    touched: set[str] = set()
    now = start
    while now <= end:
        touched |= core.tick(now)
        now += step
    return touched


class TestRegistration:
    def test_a_new_record_gets_the_lowest_free_route_id(self, core: RegistryCore) -> None:
        for sid in ("j-s0-r0", "j-s0-r1", "j-s1-r0"):
            assert core.register(instance(sid), 0) == {sid}
        assert [record.route_id for record in core.records()] == [1, 2, 3]

    def test_the_same_registration_again_changes_nothing(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        assert core.register(instance(), 1) == frozenset()

    def test_an_update_of_the_same_incarnation_keeps_its_route_id(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        assert core.register(instance(version="2"), 1) == {"j-s0-r0"}
        record = core.record("j-s0-r0")
        assert record is not None
        assert (record.version, record.route_id) == ("2", 1)

    def test_a_new_incarnation_replaces_and_fences_the_old_one(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        core.change(change(S.FAULTED), 1)
        assert core.register(instance(incarnation="i2", state=S.PENDING), 2) == {"j-s0-r0"}
        record = core.record("j-s0-r0")
        assert record is not None
        assert (record.incarnation, record.state, record.route_id) == ("i2", S.PENDING, 1)
        assert record.replaced == ("i1",)

    def test_a_stale_incarnation_can_neither_renew_nor_overwrite(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        core.register(instance(incarnation="i2"), 1)
        with pytest.raises(Fenced, match="replaced by i2"):
            core.register(instance(), 2)
        with pytest.raises(Fenced):
            core.change(change(S.FAULTED), 2)
        assert core.heartbeat(beat(), 100) == frozenset()
        assert core.stale_beats == 1
        assert run_ticks(core, 7, 8) == {"j-s0-r0"}, "the stale heartbeat must not have renewed the lease"

    def test_a_gone_instance_does_not_come_back_by_a_late_duplicate(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        core.change(change(S.GONE), 1)
        with pytest.raises(Fenced, match="gone"):
            core.register(instance(), 2)
        core.register(instance(incarnation="i2"), 3)
        assert state_of(core) is S.ACTIVE

    def test_fences_survive_a_restart(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        core.register(instance(incarnation="i2"), 1)
        reborn = RegistryCore(RegistrationLeaseConfig())
        reborn.load(core.records(), 10)
        with pytest.raises(Fenced):
            reborn.register(instance(), 11)

    def test_loading_keeps_route_ids_and_gives_whole_leases(self, core: RegistryCore) -> None:
        for sid in ("j-s0-r0", "j-s0-r1"):
            core.register(instance(sid), 0)
        reborn = RegistryCore(RegistrationLeaseConfig())
        assert reborn.load(core.records(), 1000) == frozenset()
        assert reborn.records() == core.records()
        assert run_ticks(reborn, 1000, 1006) == set()
        reborn.register(instance("j-s1-r0"), 1001)
        assert reborn.records()[-1].route_id == 3

    def test_loading_mends_double_route_ids(self) -> None:
        core = RegistryCore(RegistrationLeaseConfig())
        moved = core.load([instance("j-s0-r0", route_id=1), instance("j-s0-r1", route_id=1)], 0)
        assert moved == {"j-s0-r1"}
        assert [record.route_id for record in core.records()] == [1, 2]


class TestTransitions:
    @pytest.mark.parametrize(
        ("before", "after"), [pair for pair in itertools.product(S, S) if pair[0] is not S.GONE]
    )
    def test_every_pair_follows_the_table(self, core: RegistryCore, before: S, after: S) -> None:
        core.register(instance(state=before), 0)
        if after is before:
            assert core.change(change(after), 1) == frozenset()
        elif after in INSTANCE_TRANSITIONS[before]:
            assert core.change(change(after), 1) == {"j-s0-r0"}
            assert state_of(core) is (None if after is S.GONE else after)
        else:
            with pytest.raises(IllegalTransition):
                core.change(change(after), 1)
            assert state_of(core) is before

    def test_a_newcomer_that_is_ready_says_so_within_its_state(self, core: RegistryCore) -> None:
        core.register(instance(state=S.PENDING), 0)
        assert core.change(change(S.PENDING, reason="ready"), 1) == {"j-s0-r0"}
        assert core.change(change(S.PENDING, reason="ready"), 2) == frozenset(), "a repetition"
        record = core.record("j-s0-r0")
        assert record is not None
        assert record.reason == "ready"

    def test_of_an_end_the_first_word_counts(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        core.change(change(S.FAULTED, reason="no such word"), 1)
        assert core.change(change(S.FAULTED, reason="exit code 3"), 2) == frozenset()
        record = core.record("j-s0-r0")
        assert record is not None
        assert record.reason == "no such word"

    def test_an_illegal_one_carries_the_history(self, core: RegistryCore) -> None:
        core.register(instance(state=S.PENDING), 0)
        core.change(change(S.ACTIVE), 1)
        core.change(change(S.FAULTED, reason="exit code 9"), 2)
        with pytest.raises(IllegalTransition) as caught:
            core.change(change(S.ACTIVE), 3)
        assert "pending: registered as i1 → active → faulted: exit code 9" in caught.value.text
        assert caught.value.fields["history"]

    def test_a_change_of_an_unknown_instance_is_named(self, core: RegistryCore) -> None:
        with pytest.raises(NotFound, match="register it first"):
            core.change(change(S.ACTIVE), 0)

    def test_a_heartbeat_makes_a_lost_state_change_good(self, core: RegistryCore) -> None:
        core.register(instance(state=S.PENDING), 0)
        assert core.heartbeat(beat(state=S.ACTIVE), 1) == {"j-s0-r0"}
        assert state_of(core) is S.ACTIVE

    def test_a_late_heartbeat_does_not_undo_the_agents_word(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        core.change(change(S.FAULTED), 1)
        assert core.heartbeat(beat(state=S.ACTIVE), 2) == frozenset()
        assert state_of(core) is S.FAULTED


class TestLeases:
    def test_a_silent_instance_is_faulted_once_and_stays(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        assert run_ticks(core, 0, 6) == set()
        assert core.tick(6.5) == {"j-s0-r0"}
        record = core.record("j-s0-r0")
        assert record is not None
        assert (record.state, record.reason) == (S.FAULTED, "no heartbeat for 6.5 s")
        assert run_ticks(core, 7, 60) == set()

    def test_heartbeats_keep_it(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        for second in range(30):
            core.heartbeat(beat(), second)
            assert core.tick(second + 0.5) == frozenset()

    def test_a_silent_service_is_removed_and_may_return_with_the_same_incarnation(
        self, core: RegistryCore
    ) -> None:
        core.register(service(), 0)
        assert run_ticks(core, 0, 7) == {"gateway-east"}
        assert core.record("gateway-east") is None
        assert core.register(service(), 20) == {"gateway-east"}

    def test_our_own_lag_expires_nobody(self, core: RegistryCore) -> None:
        core.register(instance(), 0)
        core.tick(0.5)
        assert core.tick(60) == frozenset(), "59 s in which the registry itself stood still"
        assert run_ticks(core, 60.5, 61.5) == set(), "their heartbeats wait in our socket"
        assert run_ticks(core, 62, 70) == {"j-s0-r0"}, "after that silence counts again"

    def test_forgiving_never_puts_a_lease_into_the_future(self, core: RegistryCore) -> None:
        core.register(instance(), 10)
        core.forgive(1000, 11)
        assert run_ticks(core, 11, 17) == set()
        assert core.tick(17.5) == {"j-s0-r0"}

    @pytest.mark.parametrize(
        "settings",
        [{"heartbeat_s": 0.0}, {"heartbeat_s": 3.0}, {"tick_s": 0.0}, {"tick_s": 3.0}, {"expiry_s": 1.0}],
    )
    def test_settings_that_cannot_work_are_refused(self, settings: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="_s"):
            RegistrationLeaseConfig(**settings)


class TestDepartures:
    """The bus says that a connection closed: a hint, checked by listening."""

    def test_who_is_not_heard_of_again_is_lost_long_before_its_lease_ends(self, core: RegistryCore) -> None:
        core.register(instance(), 0, "host/i1")
        core.register(instance("j-s0-r1"), 0, "other/i1")
        assert core.departed("host/i1", "Client Closed", 1.0) == 1
        assert run_ticks(core, 1, 3) == set()
        assert core.tick(3.5) == {"j-s0-r0"}
        record = core.record("j-s0-r0")
        assert record is not None
        assert record.state is S.FAULTED
        assert record.reason == "its connection closed (Client Closed), and nothing more for 2.5 s"

    @pytest.mark.parametrize("sign", ["heartbeat", "registration"])
    def test_a_reconnect_is_no_death(self, core: RegistryCore, sign: str) -> None:
        core.register(instance(), 0, "host/i1")
        core.departed("host/i1", "Stale Connection", 1.0)
        if sign == "heartbeat":
            core.heartbeat(beat(), 1.5)
        else:
            core.register(instance(), 1.5, "host/i1")
        assert run_ticks(core, 1.5, 7) == set()

    def test_it_concerns_the_connection_that_it_came_over_last(self, core: RegistryCore) -> None:
        core.register(instance(), 0, "host/i1")
        core.register(instance(incarnation="i2"), 1, "host/i2")
        assert core.departed("host/i1", "Client Closed", 2.0) == 0
        assert core.departed("nobody/i1", "Client Closed", 2.0) == 0
        assert run_ticks(core, 2, 6) == set()

    def test_our_own_lag_is_no_silence_of_theirs(self, core: RegistryCore) -> None:
        core.register(instance(), 0, "host/i1")
        core.tick(0.5)
        core.departed("host/i1", "Client Closed", 1.0)
        assert core.tick(30) == frozenset(), "its reconnect may wait in our socket"
        assert run_ticks(core, 30.5, 33) == {"j-s0-r0"}

    def test_a_service_goes_without_a_fence(self, core: RegistryCore) -> None:
        core.register(service(), 0, "gateway-east/g1")
        core.departed("gateway-east/g1", "Client Closed", 1.0)
        assert run_ticks(core, 1, 4) == {"gateway-east"}
        assert core.register(service(), 5, "gateway-east/g1") == {"gateway-east"}


class TestAbuse:
    def test_a_flapping_instance_leaves_nothing_behind(self, core: RegistryCore) -> None:
        core.register(instance("j-s1-r0"), 0)
        for turn in range(100):
            incarnation, holder = f"i{turn}", f"host/i{turn}"
            core.register(instance(incarnation=incarnation, state=S.PENDING, route_id=2), turn, holder)
            assert core.route_id("j-s0-r0") == 2
            core.change(change(S.GONE, incarnation=incarnation), turn)
        assert len(core) == 1
        assert core.fenced_sids == 1
        core.register(instance("j-s2-r0"), 100)
        assert core.route_id("j-s2-r0") == 2
        with pytest.raises(Fenced):
            core.register(instance(incarnation="i99"), 101)
        core.register(instance(incarnation="i100"), 101)
        record = core.record("j-s0-r0")
        assert record is not None
        assert len(record.replaced) == 16

    def test_a_record_beyond_all_measure_is_refused_and_leaves_nothing(self, core: RegistryCore) -> None:
        with pytest.raises(BadMessage, match="the registry takes"):
            core.register(instance(tags=("x" * 100_000,)), 0)
        core.register(instance(), 0)
        assert core.route_id("j-s0-r0") == 1
        for huge in (instance(version="x" * 100_000), instance(incarnation="i2", version="x" * 100_000)):
            with pytest.raises(BadMessage):
                core.register(huge, 1)
        record = core.record("j-s0-r0")
        assert record is not None
        assert (record.incarnation, record.version, record.replaced) == ("i1", "", ())

    def test_it_remembers_a_bounded_number_of_the_gone(self) -> None:
        core = RegistryCore(RegistrationLeaseConfig(remembered_sids=50))
        for number in range(200):
            sid = f"j-s0-r{number}"
            core.register(instance(sid), 0)
            core.change(change(S.GONE, sid), 0)
        assert core.fenced_sids == 50

    def test_of_two_that_take_one_name_again_and_again_the_newer_stays(self, core: RegistryCore) -> None:
        core.register(instance(incarnation="one"), 0)
        core.register(instance(incarnation="two"), 0)
        for now in range(1, 20):
            with pytest.raises(Fenced):
                core.register(instance(incarnation="one"), now)
            assert core.register(instance(incarnation="two"), now) == frozenset()
            assert core.heartbeat(beat(incarnation="one"), now) == frozenset()
        assert core.stale_beats == 19

    def test_ten_thousand_registrations_and_their_end(self, core: RegistryCore) -> None:
        for number in range(10_000):
            core.register(instance(f"j-s{number % 8}-r{number}"), 0, f"host/{number}")
        assert len(core.resolve(Resolve(job="j", stage=3))) == 1_250
        assert len(core.release("j")) == 10_000
        assert (len(core), core.resolve(Resolve())) == (0, ())
        core.register(instance(incarnation="i2"), 1)
        assert core.route_id("j-s0-r0") == 1


class TestRelease:
    def test_a_jobs_records_and_route_ids_go(self, core: RegistryCore) -> None:
        for sid in ("a-s0-r0", "a-s1-r0", "b-s0-r0"):
            core.register(instance(sid), 0)
        assert core.release("a") == {"a-s0-r0", "a-s1-r0"}
        assert [record.sid for record in core.records()] == ["b-s0-r0"]
        core.register(instance("c-s0-r0"), 1)
        again = core.record("c-s0-r0")
        assert again is not None
        assert again.route_id == 1
        assert core.release("a") == frozenset()

    def test_route_ids_are_reused_from_the_lowest(self) -> None:
        routes = RouteIds()
        assert [routes.take() for _ in range(3)] == [1, 2, 3]
        routes.release(2)
        routes.release(2)
        assert [routes.take(), routes.take()] == [2, 4]
        assert routes.take(9) == 9
        assert [routes.take() for _ in range(4)] == [5, 6, 7, 8]
        assert routes.take() == 10
        assert routes.take(9) == 11

    def test_a_wanted_route_id_takes_no_more_memory_than_any_other(self) -> None:
        """It comes from whoever registers."""
        routes = RouteIds()
        assert routes.take(10**15) == 10**15
        assert [routes.take(), routes.take()] == [1, 2]
        routes.release(10**15)
        assert routes.take() == 3

    def test_taken_and_released_ten_thousand_times_it_is_still_the_lowest(self) -> None:
        routes = RouteIds()
        routes.take()
        for _ in range(10_000):
            assert routes.take(2) == 2
            routes.release(2)
        assert [routes.take() for _ in range(3)] == [2, 3, 4]


class TestResolution:
    """Draft §1: discovery by content, not by address."""

    @pytest.fixture
    def full(self, core: RegistryCore) -> RegistryCore:
        tokens = (TensorSchema(shape=(128,), dtype="int64"),)
        core.register(instance("j-data-r0", output_schema=tokens), 0)
        core.register(instance("j-s0-r0", input_schema=tokens), 0)
        core.register(instance("j-s0-r1", cluster="west", state=S.PENDING), 0)
        core.register(instance("j-s1-r0", cluster="west"), 0)
        core.register(instance("k-s0-r0"), 0)
        core.register(service(), 0)
        return core

    @pytest.mark.parametrize(
        ("query", "sids"),
        [
            ({}, ["j-data-r0", "j-s0-r0", "j-s0-r1", "j-s1-r0", "k-s0-r0", "gateway-east"]),
            ({"sid": "j-s1-r0"}, ["j-s1-r0"]),
            ({"sid": "nobody"}, []),
            ({"sid": "j-s1-r0", "cluster": "east"}, []),
            ({"prefix": "train/j"}, ["j-data-r0", "j-s0-r0", "j-s0-r1", "j-s1-r0"]),
            ({"prefix": "train/j/stage/0"}, ["j-s0-r0", "j-s0-r1"]),
            ({"prefix": "train/j/sta"}, []),
            ({"kind": EntityKind.GATEWAY}, ["gateway-east"]),
            ({"job": "k"}, ["k-s0-r0"]),
            ({"job": "j", "stage": 0, "state": S.ACTIVE}, ["j-s0-r0"]),
            ({"cluster": "west"}, ["j-s0-r1", "j-s1-r0"]),
            ({"tags": ("stage:0", "job:j")}, ["j-s0-r0", "j-s0-r1"]),
            ({"input_schema": (TensorSchema(shape=(128,), dtype="int64"),)}, ["j-s0-r0"]),
            ({"output_schema": (TensorSchema(shape=(128,), dtype="int64"),)}, ["j-data-r0"]),
        ],
    )
    def test_every_given_filter_must_match(self, full: RegistryCore, query: dict, sids: list[str]) -> None:
        assert [record.sid for record in full.resolve(Resolve(**query))] == sids

    def test_places_are_found_by_what_they_can_do(self, core: RegistryCore) -> None:
        for number, (device, gib, speed) in enumerate(
            [("cpu", 8, 1e11), ("cuda", 24, 1e13), ("cuda", 80, 9e13)]
        ):
            able = Capability(device=device, memory_bytes=gib << 30, flops_per_s=speed)
            core.register(instance(f"j-s0-r{number}", capability=able), 0)

        def found(**query: Any) -> list[str]:
            return [record.sid for record in core.resolve(Resolve(job="j", **query))]

        assert found(device="cuda") == ["j-s0-r1", "j-s0-r2"]
        assert found(min_memory_bytes=24 << 30) == ["j-s0-r1", "j-s0-r2"]
        assert found(device="cuda", min_memory_bytes=25 << 30) == ["j-s0-r2"]
        assert found(min_flops_per_s=1e14) == []

    def test_a_node_is_found_by_any_of_its_slots_and_a_query_means_the_same_everywhere(
        self, core: RegistryCore
    ) -> None:
        gpu = Capability(
            device="cuda", kind="cuda", memory_bytes=80, precisions=("fp32", "bf16"), bits_class="cuda-1"
        )
        cpu = Capability(memory_bytes=8, precisions=("fp32",), bits_class="cpu-1")
        whole = cpu.model_copy(update={"memory_bytes": 88})
        node = service(
            "a-n",
            kind=EntityKind.CLUSTER,
            prefix="entity/cluster/a",
            capability=whole,
            offers=(cpu, gpu),
        )
        core.register(node, 0)
        core.register(instance("j-s0-r0", capability=Capability(device="cuda:1", memory_bytes=80)), 0)
        core.register(instance("j-s0-r1", capability=gpu, tags=("label:region=eu",)), 0)
        for query, sids in (
            ({"device": "cuda"}, ["a-n", "j-s0-r0", "j-s0-r1"]),
            ({"device": "cpu"}, ["a-n"]),
            ({"min_memory_bytes": 81}, []),
            ({"precision": "bf16"}, ["a-n", "j-s0-r1"]),
            ({"bits_class": "cuda-1"}, ["a-n", "j-s0-r0", "j-s0-r1"]),
            ({"bits_class": "cpu-1", "kind": EntityKind.CLUSTER}, ["a-n"]),
            ({"tags": ("label:region=eu",), "precision": "bf16"}, ["j-s0-r1"]),
        ):
            asked = Resolve(**query)
            assert [record.sid for record in core.resolve(asked)] == sids
            assert [record.sid for record in core.records() if asked.matches(record)] == sids

    def test_a_change_is_found_under_its_new_content_only(self, full: RegistryCore) -> None:
        full.change(change(S.DRAINING), 1)
        full.register(instance("j-s1-r0", cluster="north"), 1)
        assert [r.sid for r in full.resolve(Resolve(state=S.DRAINING))] == ["j-s0-r0"]
        assert [r.sid for r in full.resolve(Resolve(cluster="north"))] == ["j-s1-r0"]
        assert [r.sid for r in full.resolve(Resolve(cluster="west"))] == ["j-s0-r1"]

    def test_a_large_answer_comes_in_pages(self, full: RegistryCore) -> None:
        after, sids = 0, []
        for expected in (2, 2, 2):
            page, after = full.page(Resolve(after=after), 1 << 20, 2)
            assert len(page) == expected
            sids += [packed.open().sid for packed in page]
        assert after == 0
        assert sids == [record.sid for record in full.records()]

    def test_a_page_is_bounded_in_bytes_and_never_empty(self, full: RegistryCore) -> None:
        page, after = full.page(Resolve(), 1, 100)
        assert (len(page), after) == (1, 1)

    def test_a_query_looks_at_its_own_records_only(self) -> None:
        core = RegistryCore(RegistrationLeaseConfig())
        for number in range(2_000):
            core.register(instance(f"job{number // 20}-s{number % 4}-r{number}"), 0)
        core.change(StateChange(sid="job7-s0-r140", incarnation="i1", state=S.FAULTED), 1)
        for query, count in [
            ({"job": "job7", "stage": 1}, 5),
            ({"prefix": "train/job7"}, 20),
            ({"prefix": "train/job7/stage/2"}, 5),
            ({"tags": ("job:job7",)}, 20),
            ({"state": S.FAULTED}, 1),
            ({"prefix": "train/nobody"}, 0),
            ({"job": "nobody"}, 0),
        ]:
            assert len(core.resolve(Resolve(**query))) == count
            assert core.examined <= 26, query

    def test_ten_thousand_instances_tick_quickly_enough_to_be_correct(self) -> None:
        core = RegistryCore(RegistrationLeaseConfig())
        for number in range(10_000):
            core.register(instance(f"j-s{number % 8}-r{number}"), 0)
        for number in range(0, 10_000, 2):
            core.heartbeat(beat(f"j-s{number % 8}-r{number}"), 5)
        assert len(run_ticks(core, 6, 8)) == 5_000
