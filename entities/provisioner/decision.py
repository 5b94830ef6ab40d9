"""Which machines to order and to give back: pools, machines and demand in, orders with reasons out. Pure.

Jobs come in the order of the demand. What a job lacks is indivisible: if the pools can't give all of it, none
is ordered for it, so that no two jobs hold half of their machines each. Replicas beyond may come one by one.
Of the pools that fit, the one that would serve it for the least money is asked first. Caps and budget hold
for everybody. Machines whose nodes are away for a moment (the orchestrator may just have begun) will be back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from entities.provisioner.pool_state import affordable, spent_today
from schemas.machines.demand import JobDemand, MachineDemand
from schemas.machines.pools import MachinePool
from schemas.machines.records import COMING, GOING, Machine, MachineState, PoolRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineOrder:
    """So many machines of a pool are to be ordered."""

    pool: str
    count: int
    job: str
    reason: str
    is_gang: bool = False
    """Fewer would be of no use: the job begins with all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineReturn:
    """A machine is to be given back; `at_once`: without being emptied first."""

    pool: str
    machine: str
    reason: str
    at_once: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisioningDecision:
    """What is to be done. `waits`: for whom nothing is ordered, and why."""

    orders: tuple[MachineOrder, ...] = ()
    returns: tuple[MachineReturn, ...] = ()
    waits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFacts:
    """A pool, what is written of it, and why it can't be used now (empty: it can)."""

    pool: MachinePool
    record: PoolRecord
    unusable: str = ""

    def obstacle(self, now: float) -> str:
        """Why nothing can be ordered from it now, whatever the demand; empty: it can."""
        pool, record = self.pool, self.record
        if not pool.most:
            return "most is 0"
        if pool.daily_budget == 0:
            return "budget is 0" if pool.budget is not None else "it has a price and no budget"
        if self.unusable:
            return self.unusable
        if record.failures >= pool.failures:
            return f"{record.failures} failures in a row, until it is reset; the last: {record.failure}"
        if now < record.rests_until:
            return f"rests for {record.rests_until - now:.0f} s after a failure: {record.failure}"
        return ""

    def left(self, now: float) -> tuple[int, str]:
        """How many machines may be ordered now, and what keeps it from more."""
        if obstacle := self.obstacle(now):
            return 0, obstacle
        by_cap = max(0, self.pool.most - len(self.record.machines))
        by_budget = affordable(self.record, self.pool, now)
        if by_budget < by_cap:
            return int(by_budget), f"budget {self.pool.daily_budget:g} a day"
        return by_cap, f"most {self.pool.most}"


def fits(pool: MachinePool, name: str, job: JobDemand) -> bool:
    """Whether a pool's slots are such as the job needs, as far as the file of pools says."""
    needs = job.needs
    labels = {**pool.labels, "pool": name}
    return (
        name not in job.unfit_pools
        and (not needs.clusters or pool.cluster in needs.clusters)
        and needs.device in ("", pool.device)
        and (not pool.memory_gib or needs.memory_bytes <= pool.memory_gib * (1 << 30))
        and (not needs.precision or not pool.precisions or needs.precision in pool.precisions)
        and (not needs.bits_class or not pool.bits_class or needs.bits_class == pool.bits_class)
        and all(labels.get(key) == value for key, value in needs.labels.items())
    )


@dataclass(slots=True)
class _Supply:
    """One pool during a decision."""

    facts: PoolFacts
    left: int
    limit: str
    coming: int
    """Slots that will be there and that nobody has yet."""
    kept: int = 0
    """Free slots of idle machines that jobs wait with for others to come."""
    orders: list[MachineOrder] = field(default_factory=list)


def decide(facts: Mapping[str, PoolFacts], demand: MachineDemand, now: float) -> ProvisioningDecision:
    """What is to be ordered and given back now.

    Args:
        facts: all pools by name.
        demand: what the orchestrator said last.
        now: seconds since the epoch.
    """
    supplies = {name: _supply(each, now) for name, each in sorted(facts.items())}
    waits: list[str] = []
    for job in demand.jobs:
        fitting = _fitting(supplies, job)
        refusal = _serve_whole(fitting, job) if job.lacking else ""
        if refusal:
            waits.append(refusal)
        elif job.wished:
            growing = {name: supply for name, supply in fitting.items() if supply.facts.pool.grow}
            _serve(growing, job.wished, job.job, f"{job.job} {job.reason or 'is to have more replicas'}")
        if job.waits and not refusal:  # with what is there it begins, or waits for the others
            for supply in fitting.values():
                supply.kept += max(0, job.slots - job.lacking)
    for name, supply in supplies.items():
        missing = supply.facts.pool.least - _staying(supply.facts) - sum(each.count for each in supply.orders)
        if missing > 0 and supply.left:
            _order(name, supply, min(missing, supply.left), "", f"least {supply.facts.pool.least}")
    returns = [each for name, supply in supplies.items() for each in _returns(name, supply, now)]
    orders = tuple(order for supply in supplies.values() for order in supply.orders)
    return ProvisioningDecision(orders=orders, returns=tuple(returns), waits=tuple(waits))


def _supply(facts: PoolFacts, now: float) -> _Supply:
    left, limit = facts.left(now)
    coming = sum(_is_coming(machine, facts.pool, now) for machine in facts.record.machines)
    return _Supply(facts, left, limit, coming * facts.pool.slots)


def _is_coming(machine: Machine, pool: MachinePool, now: float) -> bool:
    """Whether its slots will be there, and do not count among those that are."""
    away = machine.away_since is not None and now - machine.away_since < pool.away_s
    return machine.state in COMING or (machine.state is MachineState.JOINED and away)


def _fitting(supplies: Mapping[str, _Supply], job: JobDemand) -> dict[str, _Supply]:
    """The pools that the job can use, those first that serve it for the least money."""
    names = [name for name, supply in supplies.items() if fits(supply.facts.pool, name, job)]
    slots = job.lacking or job.wished
    names.sort(key=lambda name: (supplies[name].facts.pool.price_of(slots), name))
    return {name: supplies[name] for name in names}


def _serve_whole(fitting: Mapping[str, _Supply], job: JobDemand) -> str:
    """Orders all that the job lacks, or nothing; returns why nothing."""
    can = sum(supply.coming + supply.left * supply.facts.pool.slots for supply in fitting.values())
    if can < job.lacking:
        why = "; ".join(f"{name}: {supply.limit}" for name, supply in fitting.items())
        have = f"pools give {can}" if fitting else "no pool has such slots"
        return f"{job.job} lacks {job.lacking} slots, {have}{f' ({why})' if why else ''}: nothing is ordered"
    text = f"{job.job} lacks {job.lacking} of {job.slots} slots"
    reason = f"{text}: {job.reason}" if job.reason else text
    _serve(fitting, job.lacking, job.job, reason, is_gang=True)
    return ""


def _serve(
    fitting: Mapping[str, _Supply], slots: int, job: str, reason: str, *, is_gang: bool = False
) -> None:
    """Takes what is coming anyway, and orders the rest as far as that is possible."""
    for supply in fitting.values():
        taken = min(slots, supply.coming)
        supply.coming -= taken
        slots -= taken
    for name, supply in fitting.items():
        size = supply.facts.pool.slots
        count = min(math.ceil(slots / size), supply.left)
        if count > 0:
            _order(name, supply, count, job, reason, is_gang=is_gang)
            supply.coming += max(0, count * size - slots)
            slots = max(0, slots - count * size)


def _order(name: str, supply: _Supply, count: int, job: str, reason: str, *, is_gang: bool = False) -> None:
    supply.left -= count
    order = MachineOrder(pool=name, count=count, job=job, reason=reason, is_gang=is_gang and count > 1)
    supply.orders.append(order)


def _staying(facts: PoolFacts) -> int:
    return sum(machine.state not in GOING for machine in facts.record.machines)


def _returns(name: str, supply: _Supply, now: float) -> list[MachineReturn]:
    """Machines of one pool that are given back: by its budget, and those that have long had no work."""
    pool, record = supply.facts.pool, supply.facts.record
    if (budget := pool.daily_budget) is not None:
        spent = spent_today(record, now)
        hourly = sum(machine.price for machine in record.machines)
        over = spent >= budget and hourly > 0
        if over or (hourly and spent + hourly * pool.drain_s / 3600.0 >= budget):
            why = f"budget {budget:g} a day: {spent:.4g} spent"
            going = [each for each in record.machines if each.state is not MachineState.RELEASED]
            return [
                MachineReturn(pool=name, machine=each.id, reason=why, at_once=over)
                for each in going
                if over or each.state is not MachineState.DRAINING
            ]
    spare = _staying(supply.facts) - pool.least
    kept = math.ceil(supply.kept / pool.slots)
    idle = sorted(
        (each for each in record.machines if _is_idle(each)), key=lambda each: each.idle_since or now
    )
    due = [each for each in idle if now - (each.idle_since or now) >= pool.idle_s]
    due = due[: max(0, min(spare, len(idle) - kept))]
    return [
        MachineReturn(
            pool=name,
            machine=each.id,
            reason=f"no work for {now - (each.idle_since or now):.0f} s (idle_s {pool.idle_s:g})",
        )
        for each in due
    ]


def next_due(facts: Mapping[str, PoolFacts], now: float) -> float:
    """When the next idle machine has had no work for its pool's `idle_s`; infinite: none that is not due."""
    ends = [
        machine.idle_since + each.pool.idle_s
        for each in facts.values()
        for machine in each.record.machines
        if machine.state is MachineState.JOINED and machine.idle_since is not None
    ]
    return min((end for end in ends if end > now), default=math.inf)


def _is_idle(machine: Machine) -> bool:
    return machine.state is MachineState.JOINED and machine.idle_since is not None
