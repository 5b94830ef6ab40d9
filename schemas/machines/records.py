"""Machines that were ordered: a record for each pool, written by compare-and-set before anything is done."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.machines.pools import MOST_MACHINES

KEPT_ENDED = 32
"""Ended machines of which a pool's record still tells."""


class MachineState(StrEnum):
    """How far a machine is. Each move is written before the driver is asked for what follows from it."""

    ORDERED = "ordered"  # it is being ordered: it may be there, or not
    DOUBTED = "doubted"  # nobody saw how the order ended: it is looked for by its name
    STARTING = "starting"  # the driver knows it; its node has not joined
    JOINED = "joined"  # its node offers slots
    DRAINING = "draining"  # its node gets nothing new, and is emptied
    RELEASED = "released"  # it is given back, until the driver no longer knows it
    ENDED = "ended"


MACHINE_TRANSITIONS: dict[MachineState, frozenset[MachineState]] = {
    MachineState.ORDERED: frozenset(
        {
            *(MachineState.DOUBTED, MachineState.STARTING, MachineState.JOINED, MachineState.RELEASED),
            MachineState.ENDED,
        }
    ),
    MachineState.DOUBTED: frozenset(
        {
            *(MachineState.ORDERED, MachineState.STARTING, MachineState.JOINED, MachineState.RELEASED),
            MachineState.ENDED,
        }
    ),
    MachineState.STARTING: frozenset({MachineState.JOINED, MachineState.RELEASED, MachineState.ENDED}),
    MachineState.JOINED: frozenset({MachineState.DRAINING, MachineState.RELEASED, MachineState.ENDED}),
    MachineState.DRAINING: frozenset({MachineState.RELEASED, MachineState.ENDED}),
    MachineState.RELEASED: frozenset({MachineState.ENDED}),
    MachineState.ENDED: frozenset(),
}
COMING = frozenset({MachineState.ORDERED, MachineState.DOUBTED, MachineState.STARTING})
"""States of machines whose slots will be there."""
GOING = frozenset({MachineState.DRAINING, MachineState.RELEASED})


class Machine(Part):
    """A machine. Its id is its node's name, given before it exists, and never given again."""

    id: Token
    state: MachineState = MachineState.ORDERED
    since: Time = Field(description="when it came into this state")
    ordered_at: Time
    price: float = Field(0.0, ge=0, description="for an hour, at the order")
    ordered_for: str = Field("", description="the job, or the person, for whom it was ordered")
    because: str = Field("", description="why it was ordered")
    gang: str = Field("", description="the first of the machines without which none of them is of use")
    gang_size: int = Field(0, ge=0, description="how many these are; 0: it is of use alone")
    reason: str = Field("", description="why it is in its present state")
    idle_since: Time | None = Field(None, description="since when it has no work; null: it has")
    away_since: Time | None = Field(None, description="since when its node is not heard of; null: it is")
    order: str = Field("", max_length=200, description="the command of the person who ordered it")
    ended_at: Time | None = None


class PoolRecord(Message, wire="machines.pool"):
    """Provisioner: all that holds of one pool, in the bucket `machine_pools` by its name.

    One compare-and-set writes an order's name, the caps that it keeps to, and the budget: of two leaders that
    both believe to lead, one has its order refused.
    """

    pool: Token
    number: int = Field(0, ge=0, description="of the machine that was ordered last")
    machines: tuple[Machine, ...] = Field((), max_length=2 * MOST_MACHINES, description="that have not ended")
    ended: tuple[Machine, ...] = Field((), max_length=KEPT_ENDED, description="the last ones, newest first")
    day: int = Field(0, ge=0, description="the day (since the epoch, UTC) to which `spent` belongs")
    spent: float = Field(0.0, ge=0, description="on that day, for machines that have ended")
    failures: int = Field(0, ge=0, description="orders in a row that gave no machine")
    rests_until: Time = Field(0.0, description="nothing is ordered before")
    failure: str = Field("", description="what the last failure was")
