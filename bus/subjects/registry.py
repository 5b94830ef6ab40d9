"""The service registry (SRD): records, heartbeats, states, discovery."""

from __future__ import annotations

from bus.subject_row import Names, Subject
from bus.subjects.table import (
    AAM,
    ACCOUNTANT,
    ALL,
    BROKER,
    FM,
    MG,
    MI,
    MIC,
    MODELS,
    PROVISIONER,
    SMO,
    SR,
    SRD,
)
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

INSTANCE_RECORD = Subject(
    "instance record",
    "registry.instance_record.{agent}.{sid}",
    signals.Registration,
    MIC,
    SRD,
    "Type 1 of an instance that died before it could register, by its node agent",
    reply=signals.RegistrationLease,
    names=Names.SENDER,
)
INSTANCE_STATE = Subject(
    "instance state",
    "registry.instance_state.{agent}.{sid}",
    registry.StateChange,
    MIC,
    SRD,
    "how an instance ended, or that it stands still, by its node agent",
    reply=Ack,
    names=Names.SENDER,
)
HEARTBEAT = Subject(
    "heartbeat", "registry.heartbeat.{sid}", registry.Heartbeat, ALL, SRD, "alive, once a second"
)
STATE_CHANGE = Subject(
    "state change",
    "registry.state.{sid}",
    registry.StateChange,
    MI | MG | SR | MIC | AAM | SMO | FM | BROKER | ACCOUNTANT | MODELS | PROVISIONER | SRD,
    SRD,
    "an incarnation's state moved",
    reply=Ack,
    names=Names.SENDER,
)
RESOLVE = Subject(
    "resolve",
    "registry.resolve",
    registry.Resolve,
    ALL,
    SRD,
    "discovery by content, in pages; without filters: a snapshot",
    reply=registry.Resolved,
)
RELEASE_JOB = Subject(
    "release job",
    "registry.release",
    registry.ReleaseJob,
    SMO,
    SRD,
    "§4.4(6): forget a job's records, routes and ports",
    reply=Ack,
)
REGISTRY_RECORD = Subject(
    "registry record",
    "{sid}",
    registry.ServiceRecord,
    SRD,
    ALL,
    "the registry's records",
    bucket="registry",
)
