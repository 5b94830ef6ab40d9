"""What people ask of the provisioner (`dmsc machines`), and its answers."""

from __future__ import annotations

from pydantic import Field

from schemas.base import Message, Part, Time, Token
from schemas.machines.pools import MOST_MACHINES
from schemas.machines.records import Machine


class PoolStatus(Part):
    """One pool at a glance."""

    pool: str
    driver: str
    cluster: str
    slots: int
    most: int
    least: int
    price: float = 0.0
    spent: float = Field(0.0, description="today (UTC), with the machines that are there")
    budget: float | None = None
    dry_run: bool = False
    machines: tuple[Machine, ...] = ()
    ended: tuple[Machine, ...] = ()
    failures: int = 0
    rests_until: Time = 0.0
    says: str = Field("", description="why it orders nothing now, where something keeps it from that")


class MachinesQuery(Message, wire="machines.query"):
    """MG → provisioner: which machines there are, and what would be done now."""


class MachinesStatus(Message, wire="machines.status"):
    """Provisioner → MG: all pools, and the orders that the present demand asks for.

    `plan`: one line for each order and each machine that would be given back, with its reason, and for each
    job for which nothing is ordered. The provisioner does the same, where the pool is no `dry_run`.
    """

    pools: tuple[PoolStatus, ...] = ()
    demand_at: Time | None = Field(None, description="when the orchestrator last told it; null: never")
    jobs: int = Field(0, description="that lack slots")
    lacking: int = Field(0, description="slots, in all")
    plan: tuple[str, ...] = ()


class OrderMachines(Message, wire="machines.order"):
    """MG → provisioner: order so many machines of a pool, whatever the demand; caps and budget hold."""

    pool: Token
    count: int = Field(1, ge=1, le=MOST_MACHINES)
    by: str
    reason: str = Field("", max_length=500)


class ReleaseMachine(Message, wire="machines.release"):
    """MG → provisioner: give a machine back, once it is emptied."""

    machine: Token
    by: str
    reason: str = Field("", max_length=500)


class ResetPool(Message, wire="machines.reset"):
    """MG → provisioner: forget a pool's failures, so that it orders again at once."""

    pool: Token
    by: str
