"""Balancers by themselves: what every algorithm must hold, and what each is for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from schemas.errors import BadModel
from schemas.routing import ALGORITHMS
from workers.routing.algorithms import balancer
from workers.routing.balancers import Balancer, Candidate


class Sender:
    """Chooses, sends and gets back, as a binder does."""

    def __init__(self, algorithm: str, candidates: Sequence[Candidate]) -> None:
        self.balancer: Balancer = balancer(algorithm, 1)
        self.candidates = list(candidates)
        for turn, candidate in enumerate(candidates):
            candidate.used = candidate.rank = turn - len(candidates)
        self.balancer.reset(self.candidates)
        self.now = 0.0
        self.turn = 0

    def choose(self, remaining: int | None = None) -> Candidate | None:
        chosen = self.balancer.choose(self.now, remaining)
        if chosen is not None:
            self.turn += 1
            chosen.used = chosen.rank = self.turn
            chosen.outstanding += 1
            chosen.free_at = max(self.now, chosen.free_at) + chosen.takes_ms / 1e3
            self.balancer.changed(chosen)
        return chosen

    def back(self, candidate: Candidate) -> None:
        candidate.outstanding -= 1
        candidate.free_at = self.now + candidate.load * candidate.takes_ms / 1e3
        self.balancer.changed(candidate)


def candidates(*service_ms: float, window: int = 2) -> list[Candidate]:
    return [Candidate(f"r{number}", "i", window, service_ms=ms) for number, ms in enumerate(service_ms)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(10))
def test_no_window_is_overrun_and_nobody_waits_for_nothing(algorithm: str, seed: int) -> None:
    rng = random.Random(seed)
    sender = Sender(algorithm, candidates(*(rng.uniform(1, 80) for _ in range(6)), window=3))
    open_at: list[Candidate] = []
    for _ in range(400):
        sender.now += rng.expovariate(100)
        chosen = sender.choose(rng.choice([None, 1, 2, 5, 500]))
        if chosen is not None:
            assert chosen.outstanding <= chosen.window
            open_at.append(chosen)
        else:
            assert open_at, "nothing is outstanding, so nothing would end the wait"
        if open_at and (chosen is None or rng.random() < 0.6):
            sender.back(open_at.pop(rng.randrange(len(open_at))))


def test_round_robin_waits_for_whose_turn_it_is() -> None:
    sender = Sender("round-robin", candidates(10, 500, window=1))
    first, second = sender.choose(), sender.choose()
    assert (first, second) == tuple(sender.candidates)
    assert first is not None
    assert second is not None
    sender.back(first)
    sender.back(second)
    assert sender.choose() is first
    assert sender.choose() is second
    sender.back(first)
    assert sender.choose() is first
    assert sender.choose() is None, "the second one's turn, and its window is full"


def test_weighted_by_service_time_gives_shares_by_speed() -> None:
    sender = Sender("weighted-service-time", candidates(10, 20, 40, window=10**6))
    assert Counter(one.sid for one in (sender.choose() for _ in range(70)) if one) == {
        "r0": 40,
        "r1": 20,
        "r2": 10,
    }


def test_a_policys_weight_counts_on_top_of_what_was_measured() -> None:
    found = candidates(10, 10, 10, window=10**6)
    found[2].weight = 0.5
    for algorithm in ("weighted-service-time", "expected-completion"):
        sender = Sender(algorithm, found)
        shares = Counter(one.sid for one in (sender.choose() for _ in range(50)) if one)
        assert shares == {"r0": 20, "r1": 20, "r2": 10}, algorithm
        for candidate in found:
            candidate.outstanding, candidate.free_at = 0, 0.0


def test_power_of_two_prefers_the_less_loaded() -> None:
    sender = Sender("power-of-two", candidates(*[10.0] * 40, window=10**6))
    sender.candidates[7].elsewhere = 10**5
    sender.balancer.changed(sender.candidates[7])
    shares = Counter(one.sid for one in (sender.choose() for _ in range(800)) if one)
    assert shares["r7"] == 0
    assert max(shares.values()) <= 25


def test_a_choice_looks_at_few_of_very_many() -> None:
    """DESIGN §8: nothing per microbatch grows with the number of instances."""
    looked = 0

    class Watched(Candidate):
        @property
        def takes_ms(self) -> float:
            nonlocal looked
            looked += 1
            return self.service_ms / self.weight

    rng = random.Random(2)
    many = [Watched(f"r{number}", "i", 2, service_ms=rng.uniform(10, 80)) for number in range(5000)]
    sender = Sender("expected-completion", many)
    looked = 0
    for remaining in [None, 3, 10_000] * 100:
        sender.now += 0.001
        assert sender.choose(remaining) is not None
    # Once each becomes idle, which is a part of the table's cost; beyond that a few per choice.
    assert looked <= 3 * len(many) + 300 * 40


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadModel, match="none of expected-completion"):
        balancer("fastest")
    with pytest.raises(BadModel, match="there is no module 'no_such_module'"):
        balancer("no_such_module:make")
    with pytest.raises(BadModel, match=r"os is a module of Python itself"):
        balancer("os:system")
    assert isinstance(balancer("workers.routing.balancers:RoundRobin", 3), type(balancer("round-robin")))
