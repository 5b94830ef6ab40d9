"""Who may register what: a sender its own record, and a node agent the records of its instances.

The server checks that the sender may use the subject; `bus.messaging.attribution` checks that the SIDs in the
message match the subject. This module checks the rest: a record's kind and job must follow from its SID.
Pure. Only guarded buses use it: elsewhere the names of senders are not verified.
"""

from __future__ import annotations

from schemas import names
from schemas.envelope import EntityKind, Sender
from schemas.errors import Refused
from schemas.registry import InstanceState, ServiceRecord

_CONTROL_PLANE = (
    *(EntityKind.GATEWAY, EntityKind.ROUTER, EntityKind.AUTHORIZER, EntityKind.ORCHESTRATOR),
    *(EntityKind.SERVICE_REGISTRY, EntityKind.BROKER, EntityKind.ACCOUNTANT, EntityKind.MODEL_REGISTRY),
    EntityKind.PROVISIONER,
)


def refuse_strange(record: ServiceRecord, sender: Sender) -> None:
    """Check a record that `sender` registers for itself.

    Raises:
        Refused: kind, job or prefix of the record don't belong to this sender or SID.
    """
    reason = _mismatch(record)
    if record.kind is not sender.kind:
        reason = f"a {sender.kind} registers as {record.kind}"
    if reason:
        raise Refused(f"record of {record.sid}: {reason}", sid=record.sid)


def refuse_foreign(record: ServiceRecord, agent: str, present: ServiceRecord | None) -> None:
    """Check a record that a node agent registers for an instance.

    Args:
        record: the new record.
        agent: name of the node agent.
        present: the registry's present record of that SID, if any.

    Raises:
        Refused: it is no faulted instance of the agent's node, or a living instance of another node.
    """
    reason = _mismatch(record)
    if record.kind is not EntityKind.INSTANCE or record.state is not InstanceState.FAULTED:
        reason = "a node agent registers instances that have failed, nothing else"
    elif _agent_of(record) != agent:
        reason = f"it names the node of {_agent_of(record)}, but {agent} sent it"
    elif present is not None and present.state is not InstanceState.FAULTED:
        reason = reason or _foreign_instance(present, agent)
    if reason:
        raise Refused(f"record of {record.sid}: {reason}", sid=record.sid)


def refuse_others_state(sid: str, agent: str, present: ServiceRecord | None) -> None:
    """Check a state that a node agent reports; `present` is the registry's record of that SID.

    Raises:
        Refused: it is not one of the agent's instances.
    """
    reason = "" if present is None else _foreign_instance(present, agent)
    if reason:
        raise Refused(f"state of {sid}: {reason}", sid=sid)


def _foreign_instance(present: ServiceRecord, agent: str) -> str:
    if present.kind is not EntityKind.INSTANCE:
        return f"it is a {present.kind}, which {agent} does not report"
    if _agent_of(present) != agent:
        return f"it is an instance of {_agent_of(present)}, not of {agent}"
    return ""


def _agent_of(record: ServiceRecord) -> str:
    return names.agent_name(record.endpoint.cluster, record.endpoint.node)


def _mismatch(record: ServiceRecord) -> str:
    """Why a sender with this SID can't have such a record; empty where it can."""
    sid, kind = record.sid, record.kind
    if kind is EntityKind.INSTANCE:
        if record.job is None or sid == record.job or names.job_of(sid) != record.job:
            return f"an instance of job {record.job} is called {record.job}-…"
        return _prefix_mismatch(record, f"train/{record.job}")
    if record.job is not None or record.stage is not None:
        return f"a {kind} is of no job and no stage"
    if kind is EntityKind.FUNCTIONAL_MODULE:
        if (reason := names.taken(sid)) is not None:
            return reason
        module = record.prefix.removeprefix("module/")
        if record.prefix != f"module/{module}" or names.module_of(sid) != names.module_of(module):
            return f"its prefix is {record.prefix}, and its module {names.module_of(sid)}"
        return ""
    if kind is EntityKind.CLUSTER:
        if sid != _agent_of(record):
            return f"the agent of that node is called {_agent_of(record)}"
        return _prefix_mismatch(record, f"entity/{kind}")
    if kind in _CONTROL_PLANE:
        if sid != kind and not sid.startswith(f"{kind}-"):
            return f"a {kind} is called {kind} or {kind}-…"
        return _prefix_mismatch(record, f"entity/{kind}")
    return f"a {kind} has no record"


def _prefix_mismatch(record: ServiceRecord, prefix: str) -> str:
    """Why the record is not below this prefix; empty where it is."""
    if record.prefix == prefix or record.prefix.startswith(f"{prefix}/"):
        return ""
    return f"its prefix is {record.prefix}, not {prefix}"
