"""The registry's decisions: leases, incarnations, transitions, route ids, resolution by content."""

from __future__ import annotations

import itertools

import pytest

from entities.registry_core import LeaseConfig, RegistryCore, RouteIds
from schemas.envelope import EntityKind
from schemas.errors import Fenced, IllegalTransition, NotFound
from schemas.registry import (
    INSTANCE_TRANSITIONS,
    Heartbeat,
    InstanceState,
    Resolve,
    StateChange,
    TensorSchema,
)
from tests.entity_records import instance, service

S = InstanceState


@pytest.fixture
def core() -> RegistryCore:
    return RegistryCore(LeaseConfig())


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
        reborn = RegistryCore(LeaseConfig())
        reborn.load(core.records(), 10)
        with pytest.raises(Fenced):
            reborn.register(instance(), 11)

    def test_loading_keeps_route_ids_and_gives_whole_leases(self, core: RegistryCore) -> None:
        for sid in ("j-s0-r0", "j-s0-r1"):
            core.register(instance(sid), 0)
        reborn = RegistryCore(LeaseConfig())
        assert reborn.load(core.records(), 1000) == frozenset()
        assert reborn.records() == core.records()
        assert run_ticks(reborn, 1000, 1006) == set()
        reborn.register(instance("j-s1-r0"), 1001)
        assert reborn.records()[-1].route_id == 3

    def test_loading_mends_double_route_ids(self) -> None:
        core = RegistryCore(LeaseConfig())
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
            LeaseConfig(**settings)


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

    def test_ten_thousand_instances_tick_quickly_enough_to_be_correct(self) -> None:
        core = RegistryCore(LeaseConfig())
        for number in range(10_000):
            core.register(instance(f"j-s{number % 8}-r{number}"), 0)
        for number in range(0, 10_000, 2):
            core.heartbeat(beat(f"j-s{number % 8}-r{number}"), 5)
        assert len(run_ticks(core, 6, 8)) == 5_000
