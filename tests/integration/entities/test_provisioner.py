"""The provisioner on a real bus: what it does after doubt, refusals and the end of a leader (ADR-0176)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from bus import subjects
from bus.connection import Bus
from entities.election.lease import LeadershipLeaseConfig
from entities.provisioner import Provisioner, ProvisionerConfig
from entities.provisioner.leader import UNSEEN, ProvisionerTimes
from schemas.cluster import LeaveNotice
from schemas.envelope import EntityKind, Envelope
from schemas.errors import Conflict, DmscError, NotFound, Refused, Unavailable
from schemas.gateway_api import Cordons
from schemas.machines.commands import MachinesQuery, MachinesStatus, OrderMachines, ReleaseMachine, ResetPool
from schemas.machines.demand import JobDemand, MachineDemand, MachineUse
from schemas.machines.pools import MachinePool, PoolsFile
from schemas.machines.records import Machine, MachineState
from tests.integration.entities.conftest import Dial, Start, end
from tests.patience import NEVER_S, PATIENCE_S
from tests.waiting import eventually

QUICK = ProvisionerTimes(tick_s=0.05, list_s={}, list_else_s=0.05, again_s=0.1)
LEASE = LeadershipLeaseConfig(lease_s=1.0)
LIST = {"order": ["true"], "list": ["true"], "release": ["true"]}
S = MachineState


class Fleet:
    """A driver that keeps its machines in memory, as somebody else's data centre would."""

    def __init__(self, *, idempotent: bool = False) -> None:
        self.idempotent = idempotent
        self.orders: Counter[str] = Counter()
        self.released: Counter[str] = Counter()
        self.there: set[str] = set()
        self.error: DmscError | None = None
        self.hangs = False
        self.lands = True

    async def order(self, machine: str) -> None:
        self.orders[machine] += 1
        if self.hangs:
            if self.lands:
                self.there.add(machine)
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        self.there.add(machine)

    async def release(self, machine: str) -> None:
        self.released[machine] += 1
        self.there.discard(machine)

    async def machines(self) -> frozenset[str]:
        return frozenset(self.there)


class Orchestrator:
    """Tells the demand, and takes orders about nodes."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.jobs: tuple[JobDemand, ...] = ()
        self.nodes: dict[str, MachineUse] = {}
        self.notices: list[LeaveNotice] = []

    async def serve(self) -> None:
        await self.bus.serve(subjects.LEAVE_NODE, self.leave)

    async def leave(self, message: LeaveNotice, envelope: Envelope) -> Cordons:
        self.notices.append(message)
        name = message.node.removeprefix("a-")
        self.nodes[name] = self.nodes[name].model_copy(update={"cordoned": True, "taken": 0})
        await self.tell()
        return Cordons(agent=message.node, cordons=())

    async def lack(self, slots: int) -> None:
        wanted = JobDemand(job="j1", since=time.time(), slots=slots, lacking=slots)
        self.jobs = (wanted,) if slots else ()
        await self.tell()

    async def join(self, name: str, taken: int) -> None:
        self.nodes[name] = MachineUse(sid=f"a-{name}", node=name, pool="far", slots=1, taken=taken)
        await self.tell()

    async def tell(self) -> None:
        nodes = tuple(self.nodes.values())
        await self.bus.publish(subjects.MACHINE_DEMAND, MachineDemand(jobs=self.jobs, nodes=nodes))


class World:
    """One pool, its fleet, an orchestrator, and people who ask."""

    def __init__(self, dial: Dial, start: Start, fleet: Fleet, **pool: Any) -> None:
        rules = {"driver": "command", "commands": LIST, "most": 2, "boot_s": NEVER_S, **pool}
        self.times = QUICK
        self.fleet = fleet
        self._file = PoolsFile(name="t", pools={"far": MachinePool.model_validate(rules)})
        self._dial = dial
        self._start = start

    async def open(self) -> None:
        self.orchestrator = Orchestrator(await self._dial("orchestrator", EntityKind.ORCHESTRATOR))
        await self.orchestrator.serve()
        self.gateway = await self._dial("gateway-a", EntityKind.GATEWAY)

    async def provisioner(self) -> asyncio.Task[None]:
        """One that leads, or stands by."""
        config = ProvisionerConfig(
            file=self._file, make_driver=lambda name, pool: self.fleet, lease=LEASE, times=self.times
        )
        return await self._start(Provisioner(await self._dial("provisioner", EntityKind.PROVISIONER), config))

    async def status(self) -> MachinesStatus:
        return await self.gateway.command(subjects.MACHINES_QUERY, MachinesQuery(), deadline_s=PATIENCE_S)

    async def machines(self) -> dict[str, Machine]:
        (pool,) = (await self.status()).pools
        return {each.id: each for each in pool.machines}

    async def until(self, name: str, state: MachineState) -> Machine:
        found: Machine | None = None

        async def reached() -> bool:
            nonlocal found
            (pool,) = (await self.status()).pools
            found = next((each for each in (*pool.machines, *pool.ended) if each.id == name), None)
            return found is not None and found.state is state

        await eventually(reached, lambda: f"{name} is not {state}: {found}")
        assert found is not None
        return found


async def test_an_order_whose_end_nobody_saw_is_found_by_its_name_and_never_placed_again(
    dial: Dial, start: Start
) -> None:
    world = World(dial, start, Fleet(), doubt_s=NEVER_S)
    await world.open()
    world.fleet.hangs = True
    leading = await world.provisioner()
    await world.orchestrator.lack(1)
    await eventually(lambda: world.fleet.orders["t-far-1"])
    await end(leading)

    world.fleet.hangs = False
    world.fleet.there.clear()  # not to be seen yet
    await world.provisioner()
    await world.orchestrator.tell()
    doubted = await world.until("t-far-1", S.DOUBTED)
    assert doubted.reason == UNSEEN
    world.fleet.there.add("t-far-1")
    await world.until("t-far-1", S.STARTING)
    assert world.fleet.orders == {"t-far-1": 1}


async def test_a_driver_for_which_a_name_is_one_machine_is_asked_again(dial: Dial, start: Start) -> None:
    world = World(dial, start, Fleet(idempotent=True))
    await world.open()
    world.fleet.hangs, world.fleet.lands = True, False
    leading = await world.provisioner()
    await world.orchestrator.lack(1)
    await eventually(lambda: world.fleet.orders["t-far-1"])
    await end(leading)
    world.fleet.hangs = False
    await world.provisioner()
    await world.orchestrator.tell()
    await world.until("t-far-1", S.STARTING)
    assert world.fleet.orders == {"t-far-1": 2}


async def test_an_order_that_is_not_found_after_its_doubt_is_given_up_for_another_name(
    dial: Dial, start: Start
) -> None:
    world = World(dial, start, Fleet(), doubt_s=0.2, rest_s=0.1)
    await world.open()
    world.fleet.error = Unavailable("no route")
    await world.provisioner()
    await world.orchestrator.lack(1)
    ended = await world.until("t-far-1", S.ENDED)
    assert "nobody knows it 0.2 s after its order (no route)" in ended.reason
    world.fleet.error = None
    await eventually(lambda: world.fleet.there)
    assert set(world.fleet.orders.values()) == {1}

    # The first one comes after all: nobody waits for it, so it is given back.
    world.fleet.there.add("t-far-1")
    await eventually(lambda: "t-far-1" not in world.fleet.there)
    assert world.fleet.released["t-far-1"]


async def test_a_pool_without_quota_says_so_until_it_is_reset(dial: Dial, start: Start) -> None:
    world = World(dial, start, Fleet(), failures=2, rest_s=0.05)
    await world.open()
    world.fleet.error = Refused("order: quota of 8 cards is used up")
    await world.provisioner()
    await world.orchestrator.lack(1)

    async def stopped() -> bool:
        return "until it is reset" in (await world.status()).pools[0].says

    await eventually(stopped)
    status = await world.status()
    says = "2 failures in a row, until it is reset; the last: order: quota of 8 cards is used up"
    assert status.pools[0].says == says
    assert status.pools[0].machines == ()
    assert status.plan == (f"j1 lacks 1 slots, pools give 0 (far: {says}): nothing is ordered",)
    with pytest.raises(Conflict, match="1 asked for, and 0 may be ordered now"):
        await world.gateway.command(subjects.ORDER_MACHINES, OrderMachines(pool="far", by="olga"))
    with pytest.raises(NotFound, match="no pool near; there are far"):
        await world.gateway.command(subjects.RESET_POOL, ResetPool(pool="near", by="olga"))
    world.fleet.error = None
    note = await world.gateway.command(subjects.RESET_POOL, ResetPool(pool="far", by="olga"))
    assert note.note == "far: 2 failures forgotten"
    await world.until("t-far-3", S.STARTING)


async def test_a_persons_order_that_comes_again_is_the_same_order(dial: Dial, start: Start) -> None:
    """Through another gateway, or to another leader: it carries the person's own command."""
    world = World(dial, start, Fleet())
    await world.open()
    leading = await world.provisioner()
    await world.orchestrator.tell()

    async def usable() -> bool:
        return not (await world.status()).pools[0].says

    await eventually(usable)
    order, row = OrderMachines(pool="far", by="olga"), subjects.ORDER_MACHINES
    await world.gateway.command(row, order, deadline_s=PATIENCE_S, cause="key.1")
    await world.until("t-far-1", S.STARTING)
    await end(leading)
    await world.provisioner()
    await world.gateway.command(row, order, deadline_s=PATIENCE_S, cause="key.1")
    assert set(await world.machines()) == {"t-far-1"}
    await eventually(usable)
    await world.gateway.command(row, order, deadline_s=PATIENCE_S, cause="key.2")
    assert set(await world.machines()) == {"t-far-1", "t-far-2"}


async def test_a_pool_that_only_says_what_it_would_do(dial: Dial, start: Start) -> None:
    world = World(dial, start, Fleet(), dry_run=True)
    await world.open()
    await world.provisioner()
    await world.orchestrator.lack(2)

    async def told() -> bool:
        return (await world.status()).plan == ("far: would order 2: j1 lacks 2 of 2 slots",)

    await eventually(told)
    with pytest.raises(Conflict, match="dry_run: it orders nothing"):
        await world.gateway.command(subjects.ORDER_MACHINES, OrderMachines(pool="far", by="olga"))
    assert not world.fleet.orders


async def test_one_that_stands_by_takes_over_and_empties_a_machine_before_it_goes(
    dial: Dial, start: Start
) -> None:
    world = World(dial, start, Fleet())
    await world.open()
    leading = await world.provisioner()
    await world.provisioner()
    await world.orchestrator.lack(2)
    for name in ("t-far-1", "t-far-2"):
        await world.until(name, S.STARTING)
        await world.orchestrator.join(name, taken=1)
    await world.orchestrator.lack(0)
    await world.until("t-far-1", S.JOINED)
    await end(leading)
    await world.until("t-far-2", S.JOINED)  # as the other one says, which now hears what is told
    await world.orchestrator.tell()

    release = ReleaseMachine(machine="t-far-1", by="olga", reason="its disk is full")
    answer = await world.gateway.command(subjects.RELEASE_MACHINE, release)
    assert answer.note == "t-far-1: draining"
    ended = await world.until("t-far-1", S.ENDED)
    assert ended.reason == "its disk is full"
    assert world.orchestrator.nodes["t-far-1"].cordoned
    (notice,) = world.orchestrator.notices
    assert (notice.node, notice.by, notice.reason) == ("a-t-far-1", "provisioner", "its disk is full")
    assert 100 < notice.deadline_s <= 120
    assert set(await world.machines()) == {"t-far-2"}
    assert world.fleet.orders == {"t-far-1": 1, "t-far-2": 1}


async def test_a_machine_that_is_empty_goes_at_once(dial: Dial, start: Start) -> None:
    """Its driver is asked, however lately the orchestrator was asked to empty it."""
    world = World(dial, start, Fleet(), idle_s=0.0)
    world.times = replace(QUICK, again_s=NEVER_S)
    await world.open()
    await world.provisioner()
    await world.orchestrator.lack(1)
    await world.until("t-far-1", S.STARTING)
    await world.orchestrator.lack(0)
    await world.orchestrator.join("t-far-1", taken=0)
    ended = await world.until("t-far-1", S.ENDED)
    assert "no work for" in ended.reason
    assert world.orchestrator.nodes["t-far-1"].cordoned


async def test_what_an_earlier_mesh_left_is_given_back(dial: Dial, start: Start) -> None:
    world = World(dial, start, Fleet())
    world.fleet.there |= {"t-far-7", "somebodys-own", "t-far-x"}
    await world.open()
    await world.provisioner()
    await eventually(lambda: "t-far-7" not in world.fleet.there)
    assert world.fleet.there == {"somebodys-own", "t-far-x"}
    await world.orchestrator.lack(1)
    await eventually(lambda: world.fleet.orders)
    assert set(world.fleet.orders) == {"t-far-8"}, "a name never comes again"


class Gangs(Fleet):
    """A driver that can have machines admitted together."""

    def __init__(self) -> None:
        super().__init__()
        self.gangs: dict[str, tuple[str, int]] = {}

    async def order_in_gang(self, machine: str, gang: str, size: int) -> None:
        self.gangs[machine] = (gang, size)
        await self.order(machine)


async def test_what_a_job_begins_with_is_ordered_as_one_gang(dial: Dial, start: Start) -> None:
    fleet = Gangs()
    world = World(dial, start, fleet)
    await world.open()
    await world.provisioner()
    await world.orchestrator.lack(2)
    await eventually(lambda: len(fleet.orders) == 2)
    assert fleet.gangs == {"t-far-1": ("t-far-1", 2), "t-far-2": ("t-far-1", 2)}
