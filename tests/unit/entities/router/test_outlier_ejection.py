"""Outlier ejection in virtual time: who keeps failing rests and comes back slowly; the last one stays."""

from __future__ import annotations

import itertools

from entities.router.outlier_ejection import WELL, Ejection, EjectionConfig
from schemas.step import Member

A, B, C, D = (Member(sid=f"j-s0-r{number}", incarnation="i1") for number in range(4))
STAGE = (A, B, C, D)
CONFIG = EjectionConfig(faults=3, window_s=30, base_s=10, ramp_s=8, steps=4)


def fail(ejection: Ejection, member: Member, now: float, times: int = 3) -> None:
    for _ in range(times):
        ejection.failed(member, "a link broke", now)


def rest(ejection: Ejection, now: float) -> int:
    """Whole seconds until A gets work again."""
    return next(second for second in range(200) if ejection.health(STAGE, now + second)[A].factor > 0)


def test_a_single_fault_is_nobodys() -> None:
    ejection = Ejection(CONFIG)
    fail(ejection, A, 0.0, times=2)
    fail(ejection, A, 31.0, times=1)
    assert ejection.health(STAGE, 31.0)[A] == WELL


def test_who_keeps_failing_rests_and_comes_back_step_by_step() -> None:
    ejection = Ejection(CONFIG)
    fail(ejection, A, 0.0)
    first = ejection.health(STAGE, 0.0)[A]
    assert first.factor == 0.0
    assert "a link broke" in first.reason
    factors = [ejection.health(STAGE, now)[A].factor for now in (9.9, 10.0, 12.0, 14.0, 16.0, 18.0)]
    assert factors == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


def test_each_ejection_lasts_longer_until_it_is_forgiven() -> None:
    ejection = Ejection(CONFIG)
    now, rests = 0.0, []
    for pause in (20.0, 20.0, 400.0):
        fail(ejection, A, now)
        assert ejection.health(STAGE, now)[A].factor == 0.0
        rests.append(rest(ejection, now))
        now += rests[-1] + pause
    fail(ejection, A, now)
    assert [*rests, rest(ejection, now)] == [10, 20, 30, 10]


def test_a_flapping_instance_costs_few_tables() -> None:
    """It fails twice a second for a minute: its factor changes a few times, not a hundred times."""
    ejection, factors = Ejection(CONFIG), []
    for tick in range(600):
        if tick % 5 == 0:
            ejection.failed(A, "a link broke", tick / 10)
        factors.append(ejection.health(STAGE, tick / 10)[A].factor)
    changes = sum(one != other for one, other in itertools.pairwise(factors))
    assert changes <= 8
    assert factors.count(0.0) > 450


def test_at_most_half_of_a_stage_and_never_the_last() -> None:
    ejection = Ejection(CONFIG)
    for member in STAGE:
        fail(ejection, member, 0.0)
    assert sorted(state.factor for state in ejection.health(STAGE, 0.0).values()) == [0.0, 0.0, 1.0, 1.0]
    alone = Ejection(CONFIG)
    fail(alone, A, 0.0)
    assert alone.health((A,), 0.0)[A] == WELL


def test_latency_far_beyond_its_peers_is_a_fault_and_slowness_is_not() -> None:
    ejection = Ejection(CONFIG)
    for now in range(3):
        ejection.measured({A: 2000.0, B: 10.0, C: 60.0, D: 12.0}, float(now))
    health = ejection.health(STAGE, 2.0)
    assert health[A].factor == 0.0
    assert "transfers take 2000 ms" in health[A].reason
    assert health[C] == WELL


def test_a_new_incarnation_owes_nothing() -> None:
    ejection = Ejection(CONFIG)
    fail(ejection, A, 0.0)
    reborn = Member(sid=A.sid, incarnation="i2")
    assert ejection.health((reborn, B), 0.0)[reborn] == WELL
