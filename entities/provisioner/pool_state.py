"""What is to be believed of a pool's machines, by its driver, by the orchestrator, and by the clock. Pure.

A record goes from one value to the next; whoever calls writes it before anything follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import IllegalTransition
from schemas.machines.demand import MachineUse
from schemas.machines.pools import MOST_MACHINES, MachinePool
from schemas.machines.records import (
    COMING,
    GOING,
    KEPT_ENDED,
    MACHINE_TRANSITIONS,
    Machine,
    MachineState,
    PoolRecord,
)

DAY = 86_400
MOST_DOUBLINGS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What a driver knew. `at`: when it was asked; the machines of this mesh and pool, by their names."""

    at: float
    machines: frozenset[str]


def machine_prefix(mesh: str, pool: str) -> str:
    """With what the names of a pool's machines begin; a number follows."""
    return f"{mesh}-{pool}-"


def number_of(machine: str, prefix: str) -> int | None:
    """The number in a machine's name; None: it is no machine of this pool."""
    rest = machine.removeprefix(prefix)
    return int(rest) if rest != machine and rest.isascii() and rest.isdigit() and len(rest) <= 12 else None


def moved(machine: Machine, state: MachineState, reason: str, now: float, **more: Any) -> Machine:
    """The machine in another state.

    Raises:
        IllegalTransition: it may not go from its present state to that one.
    """
    if state not in MACHINE_TRANSITIONS[machine.state]:
        raise IllegalTransition(
            f"machine {machine.id}: {machine.state} → {state}; since {machine.since:.0f}: {machine.reason}"
        )
    return machine.model_copy(update={"state": state, "reason": reason, "since": now, **more})


def replaced(record: PoolRecord, machine: Machine, now: float) -> PoolRecord:
    """The record with this machine in place of the one of its id; what an ended one cost is counted."""
    if machine.state is not MachineState.ENDED:
        machines = tuple(machine if each.id == machine.id else each for each in record.machines)
        return record.model_copy(update={"machines": machines})
    ended = machine.model_copy(update={"ended_at": now})
    return record.model_copy(
        update={
            "machines": tuple(each for each in record.machines if each.id != machine.id),
            "ended": (ended, *record.ended)[:KEPT_ENDED],
            "spent": record.spent + cost_today(machine, now),
        }
    )


def failed(record: PoolRecord, pool: MachinePool, why: str, now: float) -> PoolRecord:
    """The record after an order that gave no machine: the pool rests, twice as long each time."""
    rest_s = pool.rest_s * 2 ** min(record.failures, MOST_DOUBLINGS)
    return record.model_copy(
        update={"failures": record.failures + 1, "rests_until": now + rest_s, "failure": why}
    )


def recovered(record: PoolRecord) -> PoolRecord:
    """The record with its failures forgotten."""
    return record.model_copy(update={"failures": 0, "rests_until": 0.0, "failure": ""})


def cost_today(machine: Machine, now: float) -> float:
    """What a machine costs on the present day until now."""
    begun = max(machine.ordered_at, now - now % DAY)
    return machine.price * max(0.0, now - begun) / 3600.0


def spent_today(record: PoolRecord, now: float) -> float:
    """What a pool has cost on the present day until now."""
    kept = record.spent if record.day == int(now // DAY) else 0.0
    return kept + sum(cost_today(machine, now) for machine in record.machines)


def affordable(record: PoolRecord, pool: MachinePool, now: float) -> float:
    """How many more machines the budget allows: each present and new one is counted for an hour more.

    Or until the day ends, with which the next day's budget begins.
    """
    if (budget := pool.daily_budget) is None:
        return math.inf
    ahead_h = min(1.0, (DAY - now % DAY) / 3600.0)
    committed = sum(machine.price for machine in record.machines) * ahead_h
    left = budget - spent_today(record, now) - committed
    return max(0, math.floor(left / (pool.price * ahead_h) + 1e-9))


def observed(
    record: PoolRecord,
    pool: MachinePool,
    prefix: str,
    listing: Listing | None,
    nodes: Mapping[str, MachineUse] | None,
    now: float,
) -> PoolRecord:
    """The record as driver, orchestrator and clock have it by now.

    Args:
        record: what was believed before.
        pool: its rules.
        prefix: with what its machines' names begin.
        listing: what the driver said last; None: nothing yet.
        nodes: nodes that have joined, by machine; None: the orchestrator has said nothing lately.
        now: seconds since the epoch.
    """
    today = int(now // DAY)
    if record.day != today:
        record = record.model_copy(update={"day": today, "spent": 0.0})
    for machine in record.machines:
        node = None if nodes is None else nodes.get(machine.id)
        there = None
        if listing is not None and listing.at > machine.since:
            there = machine.id in listing.machines
        record = _seen(record, pool, machine, there, node, nodes is not None, listing, now)
    return record if listing is None else _with_strays(record, prefix, listing, nodes or {}, now)


def _seen(
    record: PoolRecord,
    pool: MachinePool,
    machine: Machine,
    there: bool | None,
    node: MachineUse | None,
    told: bool,
    listing: Listing | None,
    now: float,
) -> PoolRecord:
    """The record with what is known of one machine. `there`: whether the driver knows it; None: unknown.

    `told`: whether it is known which nodes have joined.
    """
    state = machine.state
    if state in COMING:
        return _coming(record, pool, machine, there, node, listing, now)
    if state is MachineState.RELEASED:
        if there is False:
            ended = moved(machine, MachineState.ENDED, machine.reason, now)
            return replaced(record, ended, now)
        return record
    if there is False and node is None and told:
        why = machine.reason if state is MachineState.DRAINING else "it is gone"
        return replaced(record, moved(machine, MachineState.ENDED, why, now), now)
    if not told:
        return record
    if state is MachineState.DRAINING:
        late = now - machine.since >= pool.drain_s + pool.away_s  # its agent should have ended itself by now
        if node is None or late or (node.cordoned and not node.taken):
            return replaced(record, moved(machine, MachineState.RELEASED, machine.reason, now), now)
        return record
    if node is None:  # nobody knows what runs there: it is not idle
        idle_since, away_since = None, machine.away_since or now
        if now - away_since >= pool.boot_s:
            away = moved(machine, MachineState.RELEASED, f"its node has been away for {pool.boot_s:g} s", now)
            return replaced(record, away, now)
    else:
        idle_since, away_since = None if node.taken else machine.idle_since or now, None
    if (idle_since, away_since) != (machine.idle_since, machine.away_since):
        changed = machine.model_copy(update={"idle_since": idle_since, "away_since": away_since})
        return replaced(record, changed, now)
    return record


def _coming(
    record: PoolRecord,
    pool: MachinePool,
    machine: Machine,
    there: bool | None,
    node: MachineUse | None,
    listing: Listing | None,
    now: float,
) -> PoolRecord:
    if node is not None:
        joined = moved(machine, MachineState.JOINED, "its node has joined", now, idle_since=now)
        return recovered(replaced(record, joined, now))
    if now - machine.ordered_at >= pool.boot_s:
        why = f"its node has not joined within {pool.boot_s:g} s of the order"
        return failed(replaced(record, moved(machine, MachineState.RELEASED, why, now), now), pool, why, now)
    if there and machine.state is not MachineState.STARTING:
        return replaced(record, moved(machine, MachineState.STARTING, "its driver knows it", now), now)
    if there is False and machine.state is MachineState.STARTING:
        why = "it went away before its node had joined"
        return failed(replaced(record, moved(machine, MachineState.ENDED, why, now), now), pool, why, now)
    in_doubt = machine.state is MachineState.DOUBTED and listing is not None
    if in_doubt and there is False and listing is not None and listing.at - machine.since >= pool.doubt_s:
        why = f"nobody knows it {pool.doubt_s:g} s after its order ({machine.reason})"
        return failed(replaced(record, moved(machine, MachineState.ENDED, why, now), now), pool, why, now)
    return record


def _with_strays(
    record: PoolRecord, prefix: str, listing: Listing, nodes: Mapping[str, MachineUse], now: float
) -> PoolRecord:
    """The record with machines that the driver knows and nobody has written down: they are given back.

    An order is written before it is placed. So these are of a mesh that was there before this one, or of an
    order that came very late.
    """
    known = {machine.id for machine in record.machines}
    ended = {machine.id: machine.ended_at or 0.0 for machine in record.ended}
    strays, highest = [], record.number
    for name in sorted(listing.machines - known):
        number = number_of(name, prefix)
        if number is None or listing.at <= ended.get(name, 0.0):
            continue
        highest = max(highest, number)
        state = MachineState.DRAINING if name in nodes else MachineState.RELEASED
        why = "nobody has ordered it: no record of the mesh names it"
        strays.append(Machine(id=name, state=state, since=now, ordered_at=now, reason=why))
    if not strays:
        return record
    machines = (*record.machines, *strays)[: 2 * MOST_MACHINES]
    return record.model_copy(update={"machines": machines, "number": highest})


def ordered(
    record: PoolRecord,
    pool: MachinePool,
    prefix: str,
    count: int,
    job: str,
    because: str,
    now: float,
    order: str = "",
    *,
    is_gang: bool = False,
) -> PoolRecord:
    """The record with so many machines that are about to be ordered. Their names are new for ever.

    `order`: the command by which a person ordered them. `is_gang`: fewer are of no use.
    """
    numbers = range(record.number + 1, record.number + count + 1)
    new = tuple(
        Machine(
            id=f"{prefix}{number}",
            since=now,
            ordered_at=now,
            price=pool.price,
            ordered_for=job,
            because=because,
            reason=because,
            gang=f"{prefix}{numbers.start}" if is_gang and count > 1 else "",
            gang_size=count if is_gang and count > 1 else 0,
            order=order,
        )
        for number in numbers
    )
    changes = {"number": record.number + count, "machines": (*record.machines, *new)}
    return record.model_copy(update=changes)


def given_back(record: PoolRecord, machine: Machine, reason: str, now: float, *, at_once: bool) -> PoolRecord:
    """The record with a machine on its way out: emptied first if its node has joined, unless `at_once`."""
    if machine.state is MachineState.RELEASED or (machine.state in GOING and not at_once):
        return record
    joined = machine.state is MachineState.JOINED and not at_once
    state = MachineState.DRAINING if joined else MachineState.RELEASED
    return replaced(record, moved(machine, state, reason, now), now)
