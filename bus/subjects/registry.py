"""The service registry (SRD): records, heartbeats, states, discovery."""

from __future__ import annotations

from bus.subject import Names
from bus.subjects.table import AAM, ALL, BROKER, CORE, FM, KV, MG, MI, MIC, REQUEST, SMO, SR, SRD, row
from schemas import registry, signals
from schemas.errors import Ack

__all__ = [
    "HEARTBEAT",
    "INSTANCE_RECORD",
    "INSTANCE_STATE",
    "REGISTRY_RECORD",
    "RELEASE_JOB",
    "RESOLVE",
    "STATE_CHANGE",
]

INSTANCE_RECORD = row(
    "instance record",
    "registry.instance_record.{agent}.{sid}",
    signals.Registration,
    MIC,
    SRD,
    REQUEST,
    "Type 1 of an instance that died before it could register, by its node agent",
    reply=signals.RegistrationLease,
    names=Names.SENDER,
)
INSTANCE_STATE = row(
    "instance state",
    "registry.instance_state.{agent}.{sid}",
    registry.StateChange,
    MIC,
    SRD,
    REQUEST,
    "how an instance ended, or that it stands still, by its node agent",
    reply=Ack,
    names=Names.SENDER,
)
HEARTBEAT = row(
    "heartbeat", "registry.heartbeat.{sid}", registry.Heartbeat, ALL, SRD, CORE, "alive, once a second"
)
STATE_CHANGE = row(
    "state change",
    "registry.state.{sid}",
    registry.StateChange,
    MI + MG + SR + MIC + AAM + SMO + FM + BROKER + SRD,
    SRD,
    REQUEST,
    "an incarnation's state moved",
    reply=Ack,
    names=Names.SENDER,
)
RESOLVE = row(
    "resolve",
    "registry.resolve",
    registry.Resolve,
    ALL,
    SRD,
    REQUEST,
    "discovery by content, in pages; without filters: a snapshot",
    reply=registry.Resolved,
)
RELEASE_JOB = row(
    "release job",
    "registry.release",
    registry.ReleaseJob,
    SMO,
    SRD,
    REQUEST,
    "§4.4(6): forget a job's records, routes and ports",
    reply=Ack,
)
REGISTRY_RECORD = row(
    "registry record",
    "{sid}",
    registry.ServiceRecord,
    SRD,
    ALL,
    KV,
    "the registry's records",
    bucket="registry",
)
