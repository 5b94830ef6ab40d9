"""A slow or lossy link is routed around and gets its work back; equal links cost nothing."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from schemas.data_plane import HopLoad, RouteTable
from schemas.step import Member
from tests.builders import routes
from tests.builders.routes import entry
from workers.links.link_quality import LinkCost
from workers.routing.next_hop import Binder

SERVICE_MS = 10.0


def table(sids: Sequence[str], algorithm: str = "expected-completion", **link_ms: float) -> RouteTable:
    entries = (entry(sid, window=4, service_ms=SERVICE_MS, link_ms=link_ms.get(sid, 0.0)) for sid in sids)
    return routes.table(*entries, algorithm=algorithm)


@dataclass
class World:
    """One sender and its receivers in virtual time: transfers over links, then one after the other."""

    links: dict[str, LinkCost | None]
    real_ms: dict[str, float] = field(default_factory=dict)  # what a transfer really takes; else its cost
    algorithm: str = "expected-completion"
    microbatches: int = 32
    now: float = 0.0

    def __post_init__(self) -> None:
        self.done = 0
        self.binder = Binder(
            "a",
            microbatches=self.microbatches,
            link_cost=lambda member: self.links[member.sid],
            clock=lambda: self.now,
        )
        self.binder.update(table(sorted(self.links), self.algorithm))

    def step(self) -> Counter[str]:
        """Shares of one step; it ends when all are back."""
        free_at: dict[str, float] = dict.fromkeys(self.links, 0.0)
        link_free: dict[str, float] = dict.fromkeys(self.links, 0.0)
        shares: Counter[str] = Counter()
        back: list[tuple[float, str]] = []
        todo = deque(range(self.microbatches))
        while todo or back:
            while todo:
                member = self.binder.bind(1, todo[0], len(todo))
                if member is None:
                    break
                todo.popleft()
                sid = member.sid
                shares[sid] += 1
                cost = self.links[sid]
                transfer = self.real_ms.get(sid, cost.transfer_ms if cost else 0.0) / 1e3
                wire = min((cost.wire_ms if cost else 0.0) / 1e3, transfer)
                link_free[sid] = max(self.now, link_free[sid]) + wire
                begins = max(link_free[sid] - wire + transfer, free_at[sid])
                free_at[sid] = begins + SERVICE_MS / 1e3
                back.append((free_at[sid], sid))
            back.sort()
            self.now, sid = back.pop(0)
            self.binder.returned(sid, HopLoad(open=0, service_ms=SERVICE_MS))
        self.done += 1
        self.binder.next_step(self.done)
        return shares

    def steps(self, count: int) -> Counter[str]:
        total: Counter[str] = Counter()
        for _ in range(count):
            total += self.step()
        return total


def cost(transfer_ms: float, wire_ms: float = 0.0) -> LinkCost:
    return LinkCost(transfer_ms, wire_ms)


def equal_shares(links: dict[str, LinkCost | None], algorithm: str = "expected-completion") -> list[str]:
    """The order of choices over two steps."""
    world = World(links, algorithm=algorithm)
    chosen: list[str] = []
    bind = world.binder.bind

    def noted(*given: int) -> Member | None:
        member = bind(*given)
        if member is not None:
            chosen.append(member.sid)
        return member

    world.binder.bind = noted
    world.steps(2)
    return chosen


def test_a_slow_link_is_routed_around() -> None:
    healthy = World({"r0": cost(1), "r1": cost(1), "r2": cost(1)}).steps(5)
    sick = World({"r0": cost(1), "r1": cost(1), "r2": cost(300)}).steps(5)
    assert min(healthy.values()) >= 5 * 10
    assert sick["r2"] <= 5, sick
    assert sick.total() == 5 * 32


def test_a_link_of_moderate_latency_keeps_the_work_that_it_can_do_in_time() -> None:
    shares = World({"r0": cost(1), "r1": cost(1), "r2": cost(40)}).steps(5)
    assert 5 < shares["r2"] < min(shares["r0"], shares["r1"])


def test_a_narrow_link_gets_what_it_can_carry() -> None:
    """Occupied 40 ms per microbatch, where a receiver takes 10: a quarter of the work of each other."""
    shares = World({"r0": cost(2, 1), "r1": cost(2, 1), "r2": cost(41, 40)}, microbatches=128).steps(3)
    assert 0.1 < shares["r2"] / shares["r0"] < 0.45, shares


def test_it_gets_its_work_back_when_the_link_is_well_again() -> None:
    world = World({"r0": cost(1), "r1": cost(1), "r2": cost(300)})
    world.steps(3)
    world.links["r2"] = cost(1)  # pings said so
    world.now += 1.1
    shares = world.steps(5)
    assert shares["r2"] >= 5 * 9, shares


def test_a_shunned_link_is_tried_again_and_what_that_costs_is_bounded() -> None:
    """Nothing tells of the recovery but a trial; before it, trials cost little."""
    world = World({"r0": cost(1), "r1": cost(1), "r2": cost(400)}, microbatches=12)
    begin, trials = world.now, 0
    while world.now - begin < 60.0:
        trials += world.step()["r2"]
    part = trials * 0.4 / (world.now - begin)
    print(f"{trials} trials in {world.now - begin:.0f} s of a link that is 400 ms longer: {part:.1%} of it")
    assert trials >= 1
    assert part < 0.05


@pytest.mark.parametrize("algorithm", ["expected-completion", "round-robin", "least-outstanding"])
def test_equal_links_cost_nothing(algorithm: str) -> None:
    unknown = equal_shares({"r0": None, "r1": None, "r2": None}, algorithm)
    for seed in range(20):
        rng = random.Random(seed)
        links: dict[str, LinkCost | None] = {f"r{n}": cost(rng.uniform(1.0, 2.5)) for n in range(3)}
        world = World(links, dict.fromkeys(links, 0.0), algorithm)
        assert world.steps(2) == Counter(unknown), f"seed {seed}"


def test_other_algorithms_do_not_heed_links() -> None:
    for algorithm in ("round-robin", "least-outstanding", "weighted-service-time"):
        plain = World({"r0": cost(1), "r1": cost(1)}, {"r1": 1.0}, algorithm).steps(3)
        slow = World({"r0": cost(1), "r1": cost(300, 90)}, {"r1": 1.0}, algorithm).steps(3)
        assert plain == slow, algorithm


def test_the_senders_own_measurement_comes_before_the_routers() -> None:
    world = World({"r0": cost(1), "r1": None})
    world.binder.update(table(["r0", "r1"], r0=500.0, r1=2000.0).model_copy(update={"revision": 2}))
    assert world.step()["r1"] <= 1, "the router alone knows the link to r1"
    world.links["r1"] = cost(1)
    world.now += 1.1
    assert world.step()["r1"] > 10


def test_of_an_unknown_link_nothing_bad_is_thought() -> None:
    assert World({"r0": cost(30), "r1": None}).step()["r1"] >= 15


@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), -5.0, 1e12])
def test_an_absurd_cost_changes_nothing(absurd: float) -> None:
    world = World({"r0": cost(1), "r1": cost(absurd)}, {"r1": 1.0})
    assert min(world.steps(3).values()) >= 3 * 15
