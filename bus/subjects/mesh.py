"""Gateways, routers and node agents with the orchestrator; route tables; who leads."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import FM, MG, MI, MIC, SMO, SR, SRD
from schemas import cluster, data_plane, leadership, signals
from schemas.errors import Ack

__all__ = [
    "LEADER",
    "LEADERSHIP",
    "MESH_REGISTRATION",
    "NODE_LEAVES",
    "NODE_STATUS",
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
    SMO | SRD,
    SMO | SRD,
    "which of several orchestrators, or registries, leads, and its term; by compare-and-set",
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
