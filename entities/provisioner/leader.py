"""The provisioner that leads: hears what is lacking, decides, writes, and then asks drivers.

What is to be done is in the records before it is done. So a leader that takes over finds each machine that
may be there. An order that an earlier leader wrote is placed again where a second order of a name is no
second machine; else the machine is looked for by its name, and its order counts as failed only after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from bus.messaging.handlers import Subscription
from bus.tasks import TaskSet, background
from entities import metrics
from entities.election.lease import LeadershipLeaseConfig
from entities.provisioner.decision import PoolFacts, ProvisioningDecision, decide, next_due
from entities.provisioner.drivers.machine_driver import GangDriver, MachineDriver
from entities.provisioner.machine_requests import MachineRequests
from entities.provisioner.node_emptying import NodeEmptying
from entities.provisioner.pool_book import PoolBook
from entities.provisioner.pool_state import (
    Listing,
    failed,
    given_back,
    machine_prefix,
    moved,
    observed,
    ordered,
    replaced,
    spent_today,
)
from schemas.envelope import Envelope
from schemas.errors import Conflict, DmscError, NewerRecord, Refused, Unavailable
from schemas.machines.demand import MachineDemand, MachineUse
from schemas.machines.pools import MachinePool, PoolsFile
from schemas.machines.records import Machine, MachineState, PoolRecord

log = get_logger("provisioner")

UNSEEN = "its leader ended before anybody saw how the order went"


@dataclass(frozen=True, kw_only=True)
class ProvisionerTimes:
    """When the provisioner looks, in seconds."""

    tick_s: float = 1.0
    """Between looks without any news: idle machines and budgets change by the clock alone."""
    list_s: Mapping[str, float] = field(default_factory=lambda: {"local": 1.0, "kubernetes": 1.0})
    """Between two questions to a driver, which machines there are."""
    list_else_s: float = 5.0
    again_s: float = 3.0
    """Before a driver or the orchestrator is asked again for what has not happened yet."""
    stale_s: float = 30.0
    """A demand counts for so long; it is told every ten seconds. Without one nothing is done about jobs."""
    retry_s: float = 0.5
    """Before the records are read again while the bus is away."""


@dataclass(frozen=True, kw_only=True)
class ProvisionerConfig:
    """Settings of the provisioner. `make_driver`: the driver of a pool, by its name."""

    file: PoolsFile
    make_driver: Callable[[str, MachinePool], MachineDriver]
    sid: str = "provisioner"
    node: str = "mesh"
    lease: LeadershipLeaseConfig = field(default_factory=LeadershipLeaseConfig)
    times: ProvisionerTimes = ProvisionerTimes()


class ProvisionerLeader:
    """The work of one term.

    Args:
        confirmed: returns while this one leads.
    """

    def __init__(self, bus: Bus, config: ProvisionerConfig, confirmed: Callable[[], Awaitable[None]]) -> None:
        self.refused: NewerRecord | None = None
        self._bus = bus
        self._config = config
        self._pools = config.file.pools
        self._confirmed = confirmed
        self._book = PoolBook(bus, self._pools)
        self._drivers = {name: config.make_driver(name, pool) for name, pool in self._pools.items()}
        self._listings: dict[str, Listing] = {}
        self._unlisted = dict.fromkeys(self._pools, "its driver has not answered yet")
        self._demand: MachineDemand | None = None
        self._heard_at = 0.0
        self._wake = asyncio.Event()
        self._list_now = {name: asyncio.Event() for name in self._pools}
        """Set when a driver has done something that its next listing shows."""
        self._written: set[str] = set()
        """Machines whose orders this leader has written, and not placed yet."""
        self._at_work: set[str] = set()
        """Machines about which a driver or the orchestrator is being asked."""
        self._asked_at: dict[str, float] = {}
        """When that was begun last, for machines that are in the same state since."""
        self._tasks = TaskSet()
        self._emptying = NodeEmptying(bus, config.sid)
        self._requests = MachineRequests(
            self._book,
            self._facts,
            self._plan,
            self._write_order,
            demand=lambda: self._present_demand,
            heard_at=lambda: self._heard_at or None,
            changed=self._wake.set,
        )
        self._said: set[str] = set()

    async def run(self, keeping: asyncio.Task[str], began: Callable[[], Awaitable[None]]) -> str:
        """Leads until `keeping` ends, or a record is of a newer version; returns why."""
        try:
            async with background(self._serve(began), name="serve") as serving:
                await asyncio.wait({keeping, serving}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
                return keeping.result()
        except NewerRecord as error:
            self.refused = error
            return error.text
        finally:
            await self._tasks.close()

    async def _serve(self, began: Callable[[], Awaitable[None]]) -> None:
        await self._load()
        requests, subscriptions = self._requests, list[Subscription]()
        try:
            subscriptions += [
                await self._bus.subscribe(subjects.MACHINE_DEMAND, self._hear),
                await self._bus.serve(subjects.MACHINES_QUERY, self._while_leading(requests.query)),
                await self._bus.serve(subjects.ORDER_MACHINES, self._while_leading(requests.order)),
                await self._bus.serve(subjects.RELEASE_MACHINE, self._while_leading(requests.release)),
                await self._bus.serve(subjects.RESET_POOL, self._while_leading(requests.reset)),
            ]
            await began()
            log.info("provisioner ready", pools=", ".join(self._pools))
            async with asyncio.TaskGroup() as tasks:
                for name in self._pools:
                    tasks.create_task(self._keep_listing(name), name=f"machines of {name}")
                await self._go_on()
        finally:
            for subscription in subscriptions:
                await subscription.stop(drain=False)

    def _while_leading(self, server: Callable[[Any, Envelope], Awaitable[Any]]) -> Any:
        async def confirmed_server(message: Any, envelope: Envelope) -> Any:
            await self._confirmed()
            return await server(message, envelope)

        return confirmed_server

    async def _load(self) -> None:
        while True:
            try:
                await self._book.load()
                break
            except NewerRecord:
                raise
            except DmscError as error:
                log.info("pools can't be read yet", reason=error.text)
                await asyncio.sleep(self._config.times.retry_s)
        with contextlib.suppress(DmscError):
            for name, count in (await self._book.abandoned()).items():
                remedy = "put it back with most: 0 until it has none"
                log.warning("a pool has gone, its machines stay", pool=name, machines=count, remedy=remedy)

    async def _hear(self, message: MachineDemand, envelope: Envelope) -> None:
        self._demand, self._heard_at = message, time.time()
        self._wake.set()

    @property
    def _present_demand(self) -> MachineDemand | None:
        """What is lacking; None: nobody has said so lately."""
        fresh = time.time() - self._heard_at <= self._config.times.stale_s
        return self._demand if fresh else None

    async def _keep_listing(self, name: str) -> None:
        """Asks a pool's driver again and again which machines there are."""
        times, pool = self._config.times, self._pools[name]
        while True:
            self._list_now[name].clear()
            began = time.time()
            try:
                machines = await self._drivers[name].machines()
                self._listings[name] = Listing(at=began, machines=machines)
                self._unlisted[name] = ""
                self._wake.set()
            except DmscError as error:
                why = f"its driver can't say which machines there are: {error.text}"
                if self._unlisted[name] != why:
                    log.warning("pool can't be used", pool=name, reason=why)
                self._unlisted[name] = why
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(times.list_s.get(pool.driver, times.list_else_s)):
                    await self._list_now[name].wait()

    # --- deciding -----------------------------------------------------------------------------------------
    async def _go_on(self) -> None:
        while True:
            self._wake.clear()
            await self._confirmed()
            try:
                await self._look()
            except NewerRecord:
                raise
            except Conflict as error:
                log.warning("another provisioner has written", reason=error.text)
            except DmscError as error:
                log.info("nothing is ordered now", reason=error.text)
            due_s = next_due(self._facts(), time.time()) - time.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(due_s, self._config.times.tick_s))):
                    await self._wake.wait()

    def _nodes(self) -> dict[str, MachineUse] | None:
        demand = self._present_demand
        return None if demand is None else {use.node: use for use in demand.nodes}

    async def _look(self) -> None:
        """Believes what was said, decides, writes it down, and has it carried out."""
        nodes = self._nodes()
        for name in self._pools:
            before, after = await self._book.change(name, partial(self._believed, name, nodes))
            self._tell(name, before, after)
        decision = self._plan()
        for order in decision.orders:
            if self._pools[order.pool].dry_run:
                self._say_once(f"{order.pool}: would order {order.count}: {order.reason}")
                continue
            await self._write_order(order.pool, order.count, order.job, order.reason, is_gang=order.is_gang)
        for each in decision.returns:
            back = partial(self._given_back, each.machine, each.reason, each.at_once)
            before, after = await self._book.change(each.pool, back)
            self._tell(each.pool, before, after)
        for line in decision.waits:
            self._say_once(line)
        self._said &= {*decision.waits, *(line for line in self._said if ": would order " in line)}
        await self._carry_out(nodes or {})

    def _plan(self) -> ProvisioningDecision:
        """What the present demand asks for; nothing where it is not known."""
        demand = self._present_demand
        return ProvisioningDecision() if demand is None else decide(self._facts(), demand, time.time())

    def _facts(self) -> dict[str, PoolFacts]:
        return {
            name: PoolFacts(pool=pool, record=self._book.record(name), unusable=self._unlisted[name])
            for name, pool in self._pools.items()
        }

    def _believed(self, name: str, nodes: Mapping[str, MachineUse] | None, record: PoolRecord) -> PoolRecord:
        pool, now = self._pools[name], time.time()
        if not self._drivers[name].idempotent:
            for machine in record.machines:
                is_lost = machine.id not in self._written and machine.id not in self._at_work
                if machine.state is MachineState.ORDERED and is_lost:
                    record = replaced(record, moved(machine, MachineState.DOUBTED, UNSEEN, now), now)
        prefix = machine_prefix(self._config.file.name, name)
        return observed(record, pool, prefix, self._listings.get(name), nodes, now)

    async def _write_order(
        self, name: str, count: int, job: str, reason: str, command: str = "", *, is_gang: bool = False
    ) -> None:
        change = partial(self._ordered, name, count, job, reason, command, is_gang)
        before, after = await self._book.change(name, change)
        self._tell(name, before, after)

    def _ordered(
        self, name: str, count: int, job: str, reason: str, command: str, is_gang: bool, record: PoolRecord
    ) -> PoolRecord:
        pool, now = self._pools[name], time.time()
        left, _ = PoolFacts(pool=pool, record=record, unusable=self._unlisted[name]).left(now)
        prefix = machine_prefix(self._config.file.name, name)
        room = min(count, left)
        return ordered(record, pool, prefix, room, job, reason, now, command, is_gang=is_gang)

    def _given_back(self, machine: str, reason: str, at_once: bool, record: PoolRecord) -> PoolRecord:
        there = next((each for each in record.machines if each.id == machine), None)
        return record if there is None else given_back(record, there, reason, time.time(), at_once=at_once)

    def _tell(self, name: str, before: PoolRecord, after: PoolRecord) -> None:
        """Logs each machine's new state with its reason; notes which orders are this leader's to place."""
        known = {machine.id: machine.state for machine in before.machines}
        for machine in after.machines:
            if known.get(machine.id) is machine.state:
                continue
            log.info("machine", pool=name, machine=machine.id, state=machine.state, reason=machine.reason)
            self._asked_at.pop(machine.id, None)
            if machine.id not in known and machine.state is MachineState.ORDERED:
                self._written.add(machine.id)
        left = {machine.id for machine in after.machines}
        for machine in before.machines:
            if machine.id not in left:
                log.info("machine", pool=name, machine=machine.id, state=MachineState.ENDED)
                self._asked_at.pop(machine.id, None)
        if after.failures > before.failures:
            log.warning("pool rests", pool=name, failures=after.failures, reason=after.failure)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log.info("machines", reason=line)

    # --- carrying out -------------------------------------------------------------------------------------
    async def _carry_out(self, nodes: Mapping[str, MachineUse]) -> None:
        """Has drivers and the orchestrator do what is written and not done yet."""
        for name, pool in self._pools.items():
            driver = self._drivers[name]
            for machine in self._book.record(name).machines:
                if machine.id in self._at_work:
                    continue
                if machine.state is MachineState.ORDERED:
                    if driver.idempotent or machine.id in self._written:
                        self._written.discard(machine.id)
                        self._start(machine.id, self._place(name, machine.id))
                    continue
                if not self._is_due(machine.id):
                    continue
                if machine.state is MachineState.DOUBTED and driver.idempotent:
                    self._start(machine.id, self._place(name, machine.id))
                elif machine.state is MachineState.DRAINING:
                    if machine.id in nodes:
                        left_s = machine.since + pool.drain_s - time.time()
                        empty = self._emptying.begin(pool.cluster, machine.id, machine.reason, left_s)
                        self._start(machine.id, empty)
                elif machine.state is MachineState.RELEASED:
                    self._start(machine.id, self._release(name, machine.id))

    def _is_due(self, machine: str) -> bool:
        return time.monotonic() - self._asked_at.get(machine, -1e9) >= self._config.times.again_s

    def _start(self, machine: str, work: Coroutine[Any, Any, None]) -> None:
        self._at_work.add(machine)
        self._asked_at[machine] = time.monotonic()

        async def contained() -> None:
            try:
                await work
            except DmscError as error:
                log.info("not done yet", machine=machine, reason=error.text)
            except Exception as error:
                log.error("a machine's work failed", machine=machine, exc_info=error)
            finally:
                self._at_work.discard(machine)
                self._wake.set()

        self._tasks.create(contained(), name=f"machine {machine}")

    async def _place(self, name: str, machine: str) -> None:
        """Places an order, and writes down how it went."""
        await self._confirmed()
        driver, there = self._drivers[name], _machine(self._book.record(name), machine)
        try:
            if there is not None and there.gang and isinstance(driver, GangDriver):
                await driver.order_in_gang(machine, there.gang, there.gang_size)
            else:
                await driver.order(machine)
            change = partial(self._placed, machine, MachineState.STARTING, "ordered; its node is awaited")
        except Refused as error:
            change = partial(self._refused_order, name, machine, error.text)
        except Unavailable as error:
            change = partial(self._placed, machine, MachineState.DOUBTED, error.text)
        before, after = await self._book.change(name, change)
        self._tell(name, before, after)

    def _placed(self, machine: str, state: MachineState, reason: str, record: PoolRecord) -> PoolRecord:
        there = _machine(record, machine)
        open_ = (MachineState.ORDERED, MachineState.DOUBTED)
        if there is None or there.state not in open_ or there.state is state:
            return record
        now = time.time()
        return replaced(record, moved(there, state, reason, now), now)

    def _refused_order(self, name: str, machine: str, why: str, record: PoolRecord) -> PoolRecord:
        there = _machine(record, machine)
        if there is None or there.state not in (MachineState.ORDERED, MachineState.DOUBTED):
            return record
        now = time.time()
        return failed(
            replaced(record, moved(there, MachineState.ENDED, why, now), now), self._pools[name], why, now
        )

    async def _release(self, name: str, machine: str) -> None:
        await self._drivers[name].release(machine)
        self._list_now[name].set()

    # --- metrics ------------------------------------------------------------------------------------------
    def readings(self) -> Iterator[metrics.MetricReading]:
        """Machines by pool and state, what pools have cost today, and their failures."""
        now = time.time()
        for name in self._pools:
            record = self._book.record(name)
            for state in MachineState:
                if state is not MachineState.ENDED:
                    count = sum(machine.state is state for machine in record.machines)
                    yield metrics.MACHINES(count, pool=name, state=state)
            yield metrics.MACHINES_SPENT(spent_today(record, now), pool=name)
            yield metrics.MACHINES_FAILURES(record.failures, pool=name)


def _machine(record: PoolRecord, machine: str) -> Machine | None:
    return next((each for each in record.machines if each.id == machine), None)
