"""Gateways, routers and node agents with the orchestrator; route tables; who leads; pools of machines."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import FM, MG, MI, MIC, PROVISIONER, RECORDS_BYTES, SMO, SR, SRD
from schemas import cluster, data_plane, leadership, signals
from schemas.errors import Ack
from schemas.machines import commands, demand, records

__all__ = [
    "LEADER",
    "LEADERSHIP",
    "MACHINES_QUERY",
    "MACHINE_DEMAND",
    "MACHINE_POOL",
    "MESH_REGISTRATION",
    "NODE_LEAVES",
    "NODE_STATUS",
    "ORDER_MACHINES",
    "RELEASE_MACHINE",
    "RESET_POOL",
    "ROUTE_TABLE",
    "TERMINATION",
]

MESH_REGISTRATION = Subject(
    "mesh registration",
    "mesh.registration.{sid}",
    signals.NodeRegistration,
    MG | SR,
    SMO,
    "§4.4(1): MG and SR register with the orchestrator",
    reply=Ack,
    names=Names.SENDER,
)
NODE_STATUS = Subject(
    "node status",
    "mesh.node.{sid}",
    cluster.NodeStatus,
    MIC,
    SMO,
    "a node agent registers its slots, and repeats it when they change",
    reply=Ack,
    names=Names.SENDER,
)
NODE_LEAVES = Subject(
    "node leaves",
    "mesh.leaving.{sid}",
    cluster.LeaveNotice,
    MIC,
    SMO,
    "a node agent says that its machine goes away, and when",
    reply=Ack,
    names=Names.SENDER,
)
TERMINATION = Subject(
    "termination",
    "mesh.termination.{job}.{sid}",
    signals.TerminationReport,
    MG | SR,
    SMO | SRD,
    "§4.4(6): a job's communication has ended here",
    stream="SIGNALS",
)
ROUTE_TABLE = Subject(
    "route table",
    "{job}.{cluster}.{stage}",
    data_plane.RouteTable,
    SR,
    MI | MG,
    "weighted next hops of one stage for the senders of one cluster, and of its guests",
    bucket="routes",
    names=Names.SENDER,
)
LEADERSHIP = Subject(
    "leadership",
    "{role}",
    leadership.Leadership,
    SMO | SRD | PROVISIONER,
    SMO | SRD | PROVISIONER,
    "which of several orchestrators, registries or provisioners leads, and its term; by compare-and-set",
    bucket="leadership",
)
LEADER = Subject(
    "leader",
    "mesh.leader",
    leadership.Leadership,
    SMO,
    MG | SR | MIC | FM,
    "a new orchestrator leads: register with it, it knows only what it overheard",
    stream="SIGNALS",
)
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
