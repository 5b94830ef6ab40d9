"""Faults, log lines, dead letters."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import AAM, ALL, CLIENT, MG, MI, MIC, MODELS, SMO, SR, SRD, STREAM
from schemas import fault, telemetry, unreadable
from schemas.errors import Ack

__all__ = [
    "CLUSTER_REPORT",
    "DEAD_LETTER",
    "FAULT_RECORD",
    "FAULT_REPORT",
    "FAULT_VERDICT",
    "LINK_FAULT",
    "LOG",
    "UNREADABLE",
]

LINK_FAULT = Subject(
    "link fault",
    "fault.link.{cluster}.{job}",
    fault.LinkFault,
    MI,
    SR,
    "a neighbour's link broke, to the router that serves the instance's cluster",
    stream="FAULTS",
    names=Names.RECEIVER,
)
FAULT_REPORT = Subject(
    "fault report",
    "fault.report.{sid}",
    fault.FaultReport,
    MG | SR,
    SMO,
    "§4.4(5): an abnormal state",
    reply=Ack,
    names=Names.SENDER,
)
CLUSTER_REPORT = Subject(
    "cluster report",
    "fault.cluster.{agent}.{sid}",
    fault.ClusterReport,
    MIC,
    SMO,
    "§5.5: an instance of the node is stalled, or slower than the plan expects, with its chain",
    reply=Ack,
    names=Names.SENDER,
)
FAULT_VERDICT = Subject(
    "fault verdict",
    "fault.verdict.{sid}",
    fault.FaultVerdict,
    SMO,
    ALL,
    "what it was and what is done",
    stream="FAULTS",
    names=Names.NOBODY,
)
FAULT_RECORD = Subject(
    "fault record",
    "fault.record.{job}.{sid}",
    fault.FaultRecord,
    SMO,
    MG | CLIENT,
    "the fault queue: each fault from report to end; `mesh` where there is no job",
    stream="FAULT_QUEUE",
    names=Names.NOBODY,
    delivery=STREAM,
)
LOG = Subject("log", "log.{sid}", telemetry.LogLine, ALL, CLIENT, "structured log lines", stream="LOGS")
DEAD_LETTER = Subject(
    "dead letter",
    "dead_letter.{sid}",
    telemetry.DeadLetter,
    ALL,
    SRD | CLIENT,
    "unusable messages",
    stream="DEAD_LETTERS",
)
UNREADABLE = Subject(
    "unreadable record",
    "unreadable.{sid}",
    unreadable.UnreadableValue,
    SMO | SRD | SR | AAM | MG | MODELS,
    SMO | CLIENT,
    "values in buckets that nobody can read, with their bytes",
    stream="UNREADABLE",
    delivery=STREAM,
)
