"""Routing in virtual time: the real binders and machines of a job's instances, with given service times.

`benchmarks/routing.py` measures the same with a mesh; here nothing but the choices themselves is in the way.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from schemas.routing import ALGORITHMS
from tests.sim.flow import Flow

FAST, SLOW = 0.05, 0.2


def mean(values: list[float]) -> float:
    return statistics.mean(values)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("data", [1, 2])
def test_every_microbatch_is_done_once_whatever_the_algorithm(algorithm: str, data: int) -> None:
    flow = Flow([[FAST, SLOW], [FAST, FAST, SLOW]], microbatches=40, algorithm=algorithm, data=data)
    for number in range(3):
        shares = flow.step(number).shares
        for stage in (0, 1):
            assert sum(count for sid, count in shares.items() if sid.startswith(f"j-s{stage}-")) == 40


def test_one_of_four_four_times_slower() -> None:
    slow = [[FAST, FAST, FAST, SLOW]]
    ours = mean(Flow(slow, microbatches=128).efficiency(range(6))[2:])
    static = mean(Flow(slow, microbatches=128, algorithm="round-robin").efficiency(range(6))[2:])
    print(f"{ours:.3f} of the bound, {ours / static:.2f}× the equal split")
    assert ours >= 0.95
    assert ours / static >= 2.9


def test_random_speeds() -> None:
    found = []
    for seed in range(20):
        rng = random.Random(seed)
        services = [[SLOW / rng.uniform(1, 8) for _ in range(4)]]
        found.append(mean(Flow(services, microbatches=128, seed=seed).efficiency(range(5))[2:]))
    print(f"mean {mean(found):.3f}, worst {min(found):.3f} of the bound")
    assert mean(found) >= 0.93
    assert min(found) >= 0.85


def test_equal_ones_lose_nothing_against_the_equal_split() -> None:
    """Each step alone may lose a microbatch's time (1/32); on average it must not."""

    def seconds(algorithm: str) -> float:
        flow = Flow([[FAST] * 4], microbatches=128, algorithm=algorithm, noise=0.02)
        return sum(flow.step(number).seconds for number in range(10))

    ratio = seconds("round-robin") / seconds("expected-completion")
    print(f"{ratio:.4f} of the equal split")
    assert ratio >= 0.99


def test_a_change_in_mid_run_and_back() -> None:
    flow = Flow([[FAST] * 4], microbatches=64)
    flow.efficiency(range(4))
    shares = []
    for first, service in ((4, SLOW), (10, FAST)):
        flow.set("j-s0-r3", service)
        parts = flow.efficiency(range(first, first + 5))
        assert min(parts[4:]) >= 0.9, parts
        shares.append(flow.step(first + 5).shares["j-s0-r3"])
    assert 3 <= shares[0] <= 6, "its fair share is 1/13 of 64"
    assert shares[1] == 16, "it has its work back"


def test_who_is_left_out_is_tried_now_and_then_and_gets_its_work_back() -> None:
    """It takes longer than a step with the others alone: each trial delays a step, so they are rare."""
    flow = Flow([[FAST, FAST, FAST, 20 * FAST]], microbatches=9, noise=0.0)
    for number in range(20):
        flow.step(number)
    steps = [flow.step(number) for number in range(20, 420)]
    tried = sum(step.shares["j-s0-r3"] for step in steps)
    alone = Flow([[FAST] * 3], microbatches=9, noise=0.0)
    usual = 400 * [alone.step(number) for number in range(3)][-1].seconds
    cost = sum(step.seconds for step in steps) / usual - 1
    print(f"tried {tried} times in 400 steps, which cost {100 * cost:.1f} %")
    assert 1 <= tried <= 6
    assert cost <= 0.03
    flow.set("j-s0-r3", FAST)
    back = next(number for number in range(420, 900) if flow.step(number).shares["j-s0-r3"] >= 2)
    assert back < 420 + 400


@pytest.mark.parametrize("microbatches", [8, 16, 32])
def test_the_bubble_is_that_of_1f1b(microbatches: int) -> None:
    """Windows keep the depth of 1F1B: at most 3 points above (p-1)/(m+p-1)."""
    stages = 4
    flow = Flow([[FAST]] * stages, microbatches=microbatches, hop_s=0.002)
    step = [flow.step(number) for number in range(3)][-1]
    idle = 1 - mean(list(step.busy_s.values())) / step.seconds
    least = (stages - 1) / (microbatches + stages - 1)
    print(f"idle {idle:.3f}, 1F1B {least:.3f}")
    assert idle <= least + 0.03


@pytest.mark.parametrize(
    "services",
    [
        [[FAST, FAST, FAST, SLOW], [FAST] * 4],
        [[FAST] * 4, [FAST, FAST, FAST, SLOW]],
        [[FAST] * 4, [FAST, FAST, FAST, SLOW], [FAST] * 4],
    ],
    ids=["first of two", "last of two", "middle of three"],
)
def test_pipelines_of_unequal_replicas(services: list[list[float]]) -> None:
    """Behind the first stage how much is left is an estimate: farther from the bound than a single stage."""
    part = mean(Flow(services, microbatches=128).efficiency(range(5))[2:])
    print(f"{part:.3f} of the bound")
    assert part >= 0.85


def test_a_full_instance_pushes_back_to_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bottleneck at the end: what is on its way is bounded by windows, the rest waits as numbers."""
    flow = Flow([[0.01, 0.01], [SLOW]], microbatches=64)
    data = flow.job.by_sid["j-data-r0"].machine
    deepest = 0
    send = flow.job.offer_data

    def watched(*hop: Any) -> None:
        nonlocal deepest
        send(*hop)
        deepest = max(deepest, data.in_flight)

    monkeypatch.setattr(flow.job, "offer_data", watched)
    flow.step(0)
    assert deepest == 2 * 6, "two replicas of the first of two stages, six microbatches each"
