"""What people ask of the provisioner: what there is, one more, one less, another try."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

from bus.logs import get_logger
from entities.provisioner.decision import PoolFacts, ProvisioningDecision
from entities.provisioner.pool_book import PoolBook
from entities.provisioner.pool_state import given_back, recovered, spent_today
from schemas.envelope import Envelope
from schemas.errors import Ack, Conflict, NotFound
from schemas.machines.commands import (
    MachinesQuery,
    MachinesStatus,
    OrderMachines,
    PoolStatus,
    ReleaseMachine,
    ResetPool,
)
from schemas.machines.demand import MachineDemand
from schemas.machines.records import PoolRecord

log = get_logger("provisioner")

WritesOrder = Callable[[str, int, str, str, str], Awaitable[None]]


class MachineRequests:
    """Answers requests during one term.

    Args:
        facts: all pools.
        plan: what the present demand asks for.
        write: writes an order: pool, number of machines, for whom, why, by which command.
        demand: the present demand; None: it is not known.
        heard_at: when the last one came.
        changed: called after each change.
    """

    def __init__(
        self,
        book: PoolBook,
        facts: Callable[[], dict[str, PoolFacts]],
        plan: Callable[[], ProvisioningDecision],
        write: WritesOrder,
        demand: Callable[[], MachineDemand | None],
        heard_at: Callable[[], float | None],
        changed: Callable[[], None],
    ) -> None:
        self._book = book
        self._facts = facts
        self._plan = plan
        self._demand = demand
        self._heard_at = heard_at
        self._changed = changed
        self._write = write

    async def query(self, message: MachinesQuery, envelope: Envelope) -> MachinesStatus:
        """All pools, and the plan."""
        return self._status()

    def _status(self) -> MachinesStatus:
        now, demand, plan = time.time(), self._demand(), self._plan()
        facts = self._facts()
        lines = [
            f"{order.pool}: {'would order' if facts[order.pool].pool.dry_run else 'order'} {order.count}: "
            f"{order.reason}"
            for order in plan.orders
        ]
        lines += [f"{each.pool}: give back {each.machine}: {each.reason}" for each in plan.returns]
        lacking = [] if demand is None else [job for job in demand.jobs if job.lacking or job.wished]
        return MachinesStatus(
            pools=tuple(_told(name, each, now) for name, each in facts.items()),
            demand_at=self._heard_at(),
            jobs=len(lacking),
            lacking=sum(job.lacking + job.wished for job in lacking),
            plan=(*lines, *plan.waits),
        )

    async def order(self, message: OrderMachines, envelope: Envelope) -> MachinesStatus:
        """Orders machines without a demand; one that no job uses goes again after the pool's idle time.

        A command that comes again, through another gateway or after a leader's end, is the same order.

        Raises:
            NotFound: there is no such pool.
            Conflict: the pool gives fewer now, or only says what it would do.
        """
        facts, command = self._pool(message.pool), envelope.causation or envelope.id
        if any(command == each.order for each in (*facts.record.machines, *facts.record.ended)):
            return self._status()
        left, limit = facts.left(time.time())
        if facts.pool.dry_run:
            raise Conflict(f"pool {message.pool}: dry_run: it orders nothing; take dry_run out of the file")
        if left < message.count:
            raise Conflict(
                f"pool {message.pool}: {message.count} asked for, and {left} may be ordered now ({limit})"
            )
        why = message.reason or f"ordered by {message.by}"
        log.info("machines ordered by a person", pool=message.pool, count=message.count, by=message.by)
        await self._write(message.pool, message.count, message.by, why, command)
        self._changed()
        return self._status()

    async def release(self, message: ReleaseMachine, envelope: Envelope) -> Ack:
        """Gives a machine back, once it is emptied.

        Raises:
            NotFound: no pool has it.
        """
        for name, facts in self._facts().items():
            if any(machine.id == message.machine for machine in facts.record.machines):
                why = message.reason or f"given back by {message.by}"
                _, after = await self._book.change(name, partial(_released, message.machine, why))
                self._changed()
                there = next((each for each in after.machines if each.id == message.machine), None)
                return Ack(note=f"{message.machine}: {'ended' if there is None else there.state}")
        raise NotFound(f"no machine {message.machine}; `dmsc machines list` shows them")

    async def reset(self, message: ResetPool, envelope: Envelope) -> Ack:
        """Forgets a pool's failures.

        Raises:
            NotFound: there is no such pool.
        """
        self._pool(message.pool)
        before, _ = await self._book.change(message.pool, recovered)
        log.info("pool reset", pool=message.pool, by=message.by, failures=before.failures)
        self._changed()
        return Ack(note=f"{message.pool}: {before.failures} failures forgotten")

    def _pool(self, name: str) -> PoolFacts:
        facts = self._facts()
        if name not in facts:
            raise NotFound(f"no pool {name}; there are {', '.join(facts) or 'none'}")
        return facts[name]


def _released(machine: str, why: str, record: PoolRecord) -> PoolRecord:
    there = next((each for each in record.machines if each.id == machine), None)
    return record if there is None else given_back(record, there, why, time.time(), at_once=False)


def _told(name: str, facts: PoolFacts, now: float) -> PoolStatus:
    pool, record = facts.pool, facts.record
    return PoolStatus(
        pool=name,
        driver=pool.driver,
        cluster=pool.cluster,
        slots=pool.slots,
        most=pool.most,
        least=pool.least,
        price=pool.price,
        spent=spent_today(record, now),
        budget=pool.budget,
        dry_run=pool.dry_run,
        machines=record.machines,
        ended=record.ended,
        failures=record.failures,
        rests_until=record.rests_until,
        says=facts.obstacle(now) or ("dry_run: orders nothing" if pool.dry_run else ""),
    )
