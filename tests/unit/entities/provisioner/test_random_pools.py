"""Random pools, machines and jobs, and random runs of a cloud: caps and budgets hold, and all goes back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from entities.provisioner.decision import PoolFacts, decide
from entities.provisioner.pool_state import Listing, given_back, moved, observed, ordered, spent_today
from schemas.machines.demand import MachineDemand, MachineUse
from schemas.machines.pools import MachinePool
from schemas.machines.records import Machine, PoolRecord
from schemas.machines.records import MachineState as S
from tests.builders.machine_pools import NOW, lacks, machine, pool, record


class World:
    """A cloud whose orders may fail, come late or unseen, with a leader that is killed at any moment."""

    def __init__(self, rules: MachinePool) -> None:
        self.rules = rules
        self.record = PoolRecord(pool="cpu")
        self.cloud: set[str] = set()
        self.late: set[str] = set()
        self.asked: list[str] = []
        self.joined: set[str] = set()
        self.cordoned: set[str] = set()
        self.now = NOW

    @property
    def nodes(self) -> tuple[MachineUse, ...]:
        there = sorted(self.joined & self.cloud)
        return tuple(
            MachineUse(
                sid=f"a-{name}", node=name, pool="cpu", slots=2, taken=0, cordoned=name in self.cordoned
            )
            for name in there
        )

    def step(self, need: int, fate: str, killed: bool) -> None:
        self.now += 10.0
        self.cloud |= self.late
        self.late.clear()
        self.joined |= self.cloud
        free = 2 * len([node for node in self.nodes if not node.cordoned])
        jobs = (lacks("j1", max(0, need - free), need),) if need > free else ()
        listing = Listing(at=self.now - 0.1, machines=frozenset(self.cloud))
        nodes = {node.node: node for node in self.nodes}
        self.record = observed(self.record, self.rules, "m-cpu-", listing, nodes, self.now)
        facts = {"cpu": PoolFacts(pool=self.rules, record=self.record)}
        found = decide(facts, MachineDemand(jobs=jobs, nodes=self.nodes), self.now)
        for order in found.orders:
            self.record = ordered(
                self.record, self.rules, "m-cpu-", order.count, order.job, order.reason, self.now
            )
        for each in found.returns:
            there = next(one for one in self.record.machines if one.id == each.machine)
            self.record = given_back(self.record, there, each.reason, self.now, at_once=each.at_once)
        assert len(self.record.machines) <= self.rules.most
        for one in self.record.machines:
            self.carry_out(one, fate, killed)

    def carry_out(self, one: Machine, fate: str, killed: bool) -> None:
        if one.state is S.ORDERED and one.id not in self.asked:
            self.asked.append(one.id)
            if fate in ("good", "unseen"):
                self.cloud.add(one.id)
            elif fate == "late":
                self.late.add(one.id)
        if one.state is S.ORDERED and (killed or fate != "good"):  # the next leader knows not how it ended
            doubted = moved(one, S.DOUBTED, "its leader ended", self.now)
            machines = tuple(doubted if each.id == one.id else each for each in self.record.machines)
            self.record = self.record.model_copy(update={"machines": machines})
        elif one.state is S.DRAINING:
            self.cordoned.add(one.id)
        elif one.state is S.RELEASED and not killed:
            self.cloud.discard(one.id)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["good", "unseen", "late", "lost"]), st.booleans()),
        max_size=40,
    )
)
def test_whatever_happens_caps_hold_no_name_is_ordered_twice_and_all_goes_back_to_zero(
    steps: list[tuple[int, str, bool]],
) -> None:
    world = World(pool(most=3, idle_s=20.0, boot_s=60.0, doubt_s=30.0, rest_s=10.0, failures=1000))
    for need, fate, killed in steps:
        world.step(need, fate, killed)
        assert len(world.asked) == len(set(world.asked))
        assert len(world.cloud) <= 3, "also counted where they are, and not only where they are written"
    for _ in range(40):
        world.step(0, "good", False)
    assert world.record.machines == ()
    assert world.cloud == set()


ANY_POOL = st.builds(
    lambda dry_run, **rules: pool(dry_run=dry_run, idle_s=60.0, **rules),
    slots=st.integers(1, 4),
    most=st.integers(0, 5),
    price=st.just(2.0),
    budget=st.sampled_from([0.0, 3.0, 9.0, 1e6]),
    dry_run=st.booleans(),
)
ANY_MACHINE = st.tuples(
    st.sampled_from([state for state in S if state is not S.ENDED]),
    st.sampled_from([None, NOW - 100.0, NOW - 10.0]),
)
ANY_JOB = st.tuples(st.integers(0, 12), st.integers(0, 4), st.booleans())


@settings(max_examples=300, deadline=None)
@given(
    pools=st.lists(st.tuples(ANY_POOL, st.lists(ANY_MACHINE, max_size=5)), min_size=1, max_size=3),
    jobs=st.lists(ANY_JOB, max_size=5),
    spent=st.floats(0.0, 10.0),
)
def test_whatever_is_asked_for_caps_and_budgets_hold_and_no_job_gets_half(
    pools: list[tuple[MachinePool, list[tuple[S, float | None]]]],
    jobs: list[tuple[int, int, bool]],
    spent: float,
) -> None:
    facts = {}
    for number, (rules, there) in enumerate(pools):
        machines = (
            machine(each, state, str(number), price=2.0, idle_since=idle if state is S.JOINED else None)
            for each, (state, idle) in enumerate(there)
        )
        held = record(*machines, pool=str(number), spent=spent)
        facts[str(number)] = PoolFacts(pool=rules, record=held)
    wanted = [
        lacks(f"j{number}", lacking, lacking + 2, wished=wished).model_copy(update={"waits": waits})
        for number, (lacking, wished, waits) in enumerate(jobs)
    ]
    found = decide(facts, MachineDemand(jobs=tuple(wanted)), NOW)
    for name, each in facts.items():
        count = sum(order.count for order in found.orders if order.pool == name)
        machines_then = len(each.record.machines) + count
        assert not count or machines_then <= each.pool.most
        assert not count or spent_today(each.record, NOW) + 2.0 * machines_then <= (each.pool.budget or 0.0)
        for back in (one for one in found.returns if one.pool == name):
            given = next(one for one in each.record.machines if one.id == back.machine)
            assert "budget" in back.reason or (given.state is S.JOINED and given.idle_since == NOW - 100.0)
    real = {name for name, each in facts.items() if not each.pool.dry_run}
    coming = sum(
        each.pool.slots
        for each in facts.values()
        for one in each.record.machines
        if one.state in (S.ORDERED, S.DOUBTED, S.STARTING)
    )
    room = coming + sum(
        order.count * facts[order.pool].pool.slots for order in found.orders if order.pool in real
    )
    refused = {line.split()[0] for line in found.waits}
    whole = sum(job.lacking for job in wanted if job.job not in refused)
    would = {order.job for order in found.orders if order.pool not in real}
    if not would:
        assert room >= whole, "each job that is not refused gets all that it lacks"
