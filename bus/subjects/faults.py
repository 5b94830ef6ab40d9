"""Faults, log lines, dead letters."""

from __future__ import annotations

from bus.subject import Names
from bus.subjects.table import AAM, ALL, CLIENT, CORE, MG, MI, REQUEST, SMO, SR, SRD, STREAM, row
from schemas import fault, telemetry, unreadable
from schemas.errors import Ack

__all__ = [
    "DEAD_LETTER",
    "FAULT_RECORD",
    "FAULT_REPORT",
    "FAULT_VERDICT",
    "LINK_FAULT",
    "LOG",
    "UNREADABLE",
]

LINK_FAULT = row(
    "link fault",
    "fault.link.{cluster}.{job}",
    fault.LinkFault,
    MI,
    SR,
    CORE,
    "a neighbour's link broke",
    stream="FAULTS",
    names=Names.BOTH,
)
FAULT_REPORT = row(
    "fault report",
    "fault.report.{sid}",
    fault.FaultReport,
    MG + SR,
    SMO,
    REQUEST,
    "§4.4(5): an abnormal state",
    reply=Ack,
    names=Names.SENDER,
)
FAULT_VERDICT = row(
    "fault verdict",
    "fault.verdict.{sid}",
    fault.FaultVerdict,
    SMO,
    ALL,
    CORE,
    "what it was and what is done",
    stream="FAULTS",
    names=Names.NOBODY,
)
FAULT_RECORD = row(
    "fault record",
    "fault.record.{job}.{sid}",
    fault.FaultRecord,
    SMO,
    MG + CLIENT,
    STREAM,
    "the fault queue: each fault from report to end; `mesh` where there is no job",
    stream="FAULT_QUEUE",
    names=Names.NOBODY,
)
LOG = row("log", "log.{sid}", telemetry.LogLine, ALL, CLIENT, CORE, "structured log lines", stream="LOGS")
DEAD_LETTER = row(
    "dead letter",
    "dead_letter.{sid}",
    telemetry.DeadLetter,
    ALL,
    SRD + CLIENT,
    CORE,
    "unusable messages",
    stream="DEAD_LETTERS",
)
UNREADABLE = row(
    "unreadable record",
    "unreadable.{sid}",
    unreadable.UnreadableValue,
    SMO + SRD + SR + AAM + MG,
    SMO + CLIENT,
    STREAM,
    "values in buckets that nobody can read, with their bytes",
    stream="UNREADABLE",
)
