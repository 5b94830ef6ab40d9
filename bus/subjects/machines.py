"""Machines that come and go: what is lacking, which were ordered, and what people ask (docs/machines.md)."""

from __future__ import annotations

from bus.subject_row import Subject
from bus.subjects.table import MG, PROVISIONER, RECORDS_BYTES, SMO
from schemas.errors import Ack
from schemas.machines import commands, demand, records

__all__ = [
    "MACHINES_QUERY",
    "MACHINE_DEMAND",
    "MACHINE_POOL",
    "ORDER_MACHINES",
    "RELEASE_MACHINE",
    "RESET_POOL",
]

MACHINE_DEMAND = Subject(
    "machine demand",
    "machines.demand",
    demand.MachineDemand,
    SMO,
    PROVISIONER,
    "the slots that jobs lack beside the free ones, and how pools' machines are used; on change, and again",
)
MACHINE_POOL = Subject(
    "machine pool",
    "{pool}",
    records.PoolRecord,
    PROVISIONER,
    PROVISIONER,
    "machines that were ordered, what they cost, and how orders failed; by compare-and-set",
    bucket="machine_pools",
)
MACHINES_QUERY = Subject(
    "machines query",
    "machines.query",
    commands.MachinesQuery,
    MG,
    PROVISIONER,
    "which machines there are, and what the present demand asks for",
    reply=commands.MachinesStatus,
    answer_bytes=RECORDS_BYTES,
)
ORDER_MACHINES = Subject(
    "order machines",
    "machines.order",
    commands.OrderMachines,
    MG,
    PROVISIONER,
    "a person orders machines of a pool",
    reply=commands.MachinesStatus,
    answer_bytes=RECORDS_BYTES,
)
RELEASE_MACHINE = Subject(
    "release machine",
    "machines.release",
    commands.ReleaseMachine,
    MG,
    PROVISIONER,
    "a person gives a machine back",
    reply=Ack,
)
RESET_POOL = Subject(
    "reset pool",
    "machines.reset",
    commands.ResetPool,
    MG,
    PROVISIONER,
    "a person has a pool's failures forgotten",
    reply=Ack,
)
