"""The five signals (draft §4.3), and what belongs to access: users, secrets, revocations, the audit."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import (
    AAM,
    ACCOUNTANT,
    BROKER,
    FM,
    MG,
    MI,
    MIC,
    MODELS,
    PROVISIONER,
    RECORDS_BYTES,
    SMO,
    SR,
    SRD,
    STREAM,
)
from schemas import access, audit, secrets, signals
from schemas.errors import Ack

__all__ = [
    "ACCESS",
    "ADVERTISEMENT",
    "AUDIT",
    "COMPUTE",
    "EXPLAIN_ACCESS",
    "QOS_POLICY",
    "QOS_REPORT",
    "REGISTRATION",
    "REVOCATION",
    "SECRET",
    "USER_COMMAND",
    "USER_RECORD",
]

REGISTRATION = Subject(
    "registration",
    "signal.registration.{sid}",
    signals.Registration,
    MI | MG | SR | MIC | AAM | SMO | FM | BROKER | ACCOUNTANT | MODELS | PROVISIONER | SRD,
    SRD,
    "Type 1: a service registers or updates its record",
    reply=signals.RegistrationLease,
    names=Names.SENDER,
)
ADVERTISEMENT = Subject(
    "advertisement",
    "signal.advertisement",
    signals.RouteAdvertisement,
    SRD,
    SR | MG | SMO | FM,
    "Type 2: reachable instances; deltas at once, full state periodically",
    stream="SIGNALS",
)
ACCESS = Subject(
    "access",
    "signal.access.{gateway}",
    signals.AccessRequest,
    MG,
    AAM,
    "Type 3: may this bearer do that?",
    reply=signals.AccessDecision,
    names=Names.SENDER,
)
USER_COMMAND = Subject(
    "user command",
    "access.users.{gateway}",
    access.UserCommand,
    MG,
    AAM,
    "users and their tokens: add, list, token, revoke, remove",
    reply=access.UserAnswer,
    other_replies=(access.SealedAnswer,),
    answer_bytes=RECORDS_BYTES,
    names=Names.SENDER,
)
EXPLAIN_ACCESS = Subject(
    "explain access",
    "access.explain.{gateway}",
    access.ExplainAccess,
    MG,
    AAM,
    "which rule lets whom do what",
    reply=access.AccessExplanation,
    names=Names.SENDER,
)
USER_RECORD = Subject(
    "user record",
    "{name}",
    access.StoredUser,
    AAM,
    AAM,
    "the users that have tokens which expire",
    bucket="users",
)
SECRET = Subject(
    "secret",
    "{user}.{name}",
    secrets.StoredSecret,
    MG | SMO,
    MG | SMO,
    "URLs with credentials that jobs name, sealed to the orchestrators",
    bucket="secrets",
)
REVOCATION = Subject(
    "revocation",
    "{kind}.{id}",
    access.Revocation,
    AAM,
    AAM | MG,
    "tokens, and users, that open nothing any more",
    bucket="revocations",
)
AUDIT = Subject(
    "audit",
    "audit.{authorizer}",
    audit.AuditRecord,
    AAM,
    AAM | MG,
    "refusals and privileged acts, each record with the hash of the one before",
    stream="AUDIT",
    delivery=STREAM,
)
COMPUTE = Subject(
    "compute",
    "signal.compute.{cluster}",
    signals.ComputeNotification,
    SR,
    MG | SR | FM,
    "Type 4: load, heterogeneity and latency of a cluster's instances",
    stream="SIGNALS",
)
QOS_REPORT = Subject(
    "qos report",
    "signal.qos.report.{sid}",
    signals.QosReport,
    MG | SR,
    SMO | FM,
    "Type 5 up: a cluster's throughput, latency, errors",
    stream="SIGNALS",
)
QOS_POLICY = Subject(
    "qos policy",
    "signal.qos.policy.{sid}",
    signals.CommunicationPolicy,
    SMO,
    MG | SR,
    "Type 5 down: how a job's traffic is to flow",
    reply=Ack,
)
