"""Who may say what to the registry: a record is believed of its own SID, and of a node agent's instances.

The server holds the subject to its speaker, and `bus.messaging.attribution` the SIDs in the message to the
subject. What else is in a record follows from the SID: of which kind and job it is. Pure; for guarded buses
alone, as elsewhere nobody is known by name.
"""

from __future__ import annotations

from schemas import names
from schemas.envelope import EntityKind, Sender
from schemas.errors import Refused
from schemas.registry import InstanceState, ServiceRecord

_CONTROL_PLANE = (
    *(EntityKind.GATEWAY, EntityKind.ROUTER, EntityKind.AUTHORIZER, EntityKind.ORCHESTRATOR),
    *(EntityKind.SERVICE_REGISTRY, EntityKind.BROKER),
)


def refuse_strange(record: ServiceRecord, speaker: Sender) -> None:
    """Of a record that `speaker` registers of itself.

    Raises:
        Refused: it makes itself something that it is not.
    """
    why = _not_itself(record)
    if record.kind is not speaker.kind:
        why = f"a {speaker.kind} registers as {record.kind}"
    if why:
        raise Refused(f"record of {record.sid}: {why}", sid=record.sid)


def refuse_foreign(record: ServiceRecord, agent: str, held: ServiceRecord | None) -> None:
    """Of a record that a node agent registers for an instance; `held`: what the registry knows of that SID.

    Raises:
        Refused: it is no faulted instance of the agent's node, or another's that lives.
    """
    why = _not_itself(record)
    if record.kind is not EntityKind.INSTANCE or record.state is not InstanceState.FAULTED:
        why = "a node agent registers instances that have failed, nothing else"
    elif _agent_of(record) != agent:
        why = f"it names the node of {_agent_of(record)}, and {agent} says so"
    elif held is not None and held.state is not InstanceState.FAULTED:
        why = why or _of_another(held, agent)
    if why:
        raise Refused(f"record of {record.sid}: {why}", sid=record.sid)


def refuse_others_state(sid: str, agent: str, held: ServiceRecord | None) -> None:
    """Of a state that a node agent tells; `held`: what the registry knows of that SID.

    Raises:
        Refused: it is not one of the agent's instances.
    """
    why = "" if held is None else _of_another(held, agent)
    if why:
        raise Refused(f"state of {sid}: {why}", sid=sid)


def _of_another(held: ServiceRecord, agent: str) -> str:
    if held.kind is not EntityKind.INSTANCE:
        return f"it is a {held.kind}, of which {agent} tells nothing"
    if _agent_of(held) != agent:
        return f"it is an instance of {_agent_of(held)}, not of {agent}"
    return ""


def _agent_of(record: ServiceRecord) -> str:
    return names.agent_name(record.endpoint.cluster, record.endpoint.node)


def _not_itself(record: ServiceRecord) -> str:
    """Why whoever is called so can't have such a record; empty where it can."""
    sid, kind = record.sid, record.kind
    if kind is EntityKind.INSTANCE:
        if record.job is None or sid == record.job or names.job_of(sid) != record.job:
            return f"an instance of job {record.job} is called {record.job}-…"
        return _unlike(record, f"train/{record.job}")
    if record.job is not None or record.stage is not None:
        return f"a {kind} is of no job and no stage"
    if kind is EntityKind.FUNCTIONAL_MODULE:
        if (why := names.taken(sid)) is not None:
            return why
        module = record.prefix.removeprefix("module/")
        if record.prefix != f"module/{module}" or names.module_of(sid) != names.module_of(module):
            return f"its prefix is {record.prefix}, and its module {names.module_of(sid)}"
        return ""
    if kind is EntityKind.CLUSTER:
        if sid != _agent_of(record):
            return f"the agent of that node is called {_agent_of(record)}"
        return _unlike(record, f"entity/{kind}")
    if kind in _CONTROL_PLANE:
        if sid != kind and not sid.startswith(f"{kind}-"):
            return f"a {kind} is called {kind} or {kind}-…"
        return _unlike(record, f"entity/{kind}")
    return f"a {kind} has no record"


def _unlike(record: ServiceRecord, prefix: str) -> str:
    """Why it is not found below this prefix; empty where it is."""
    if record.prefix == prefix or record.prefix.startswith(f"{prefix}/"):
        return ""
    return f"its prefix is {record.prefix}, not {prefix}"
