"""Whose name a name may be: entities, agents, instances, modules and users share one space of SIDs.

A subject says `…heartbeat.<SID>`, not of what kind the SID is, so each kind has names that no other can have:

    the control plane   its own word, or that and a cluster: `orchestrator`, `gateway-a`
    an instance         its job and a dash: `j1a2b3c-s0-r1`. Only a job's id looks like `j1a2b3c`
    a node agent        cluster and node: `a-n`, `b-c--n` (`agent_name`)
    a module            its policy's name, or that of the user who runs it; a user is named like no cluster
"""

from __future__ import annotations

import re

from schemas.errors import BadInput

RESERVED = (
    *("service-registry", "registry", "gateway", "authorizer", "router", "orchestrator", "broker"),
    *("supervisor", "guard", "system", "join", "jetstream"),
)
"""The control plane's, and what stands in such a place."""

MESH = "system"
"""Stands where a user's name would, for functional modules that are no user's: no user is called so."""

_job = re.compile(r"j[0-9a-f]{6}")


def job_of(sid: str) -> str:
    """The job whose instance a SID is: jobs' names have no dash."""
    return sid.partition("-")[0]


def module_of(sid: str) -> str:
    """The functional module whose process a SID is: a shadow has a name of its own, `mine-shadow-2`."""
    return sid.partition("-shadow-")[0] or sid


def is_users(module: str, user: str) -> bool:
    """Whether a functional module bears this user's name, as those do that the user runs: `ann`, `ann-…`."""
    return module == user or module.startswith(f"{user}-")


def taken(name: str) -> str | None:
    """Why nobody but its owner may be called so; None where anybody may."""
    if (why := reserved(name)) is not None:
        return why
    if _job.fullmatch(job_of(name.lower())):
        return f"{job_of(name)!r} is what jobs are called"
    return None


def reserved(name: str) -> str | None:
    """Why it is the control plane's; None where it is not. Instances, too, are held to this."""
    lowered = name.lower()
    for word in RESERVED:
        if lowered == word or lowered.startswith(f"{word}-"):
            return f"{word!r} is the name of a part of the mesh"
    return None


STANDING = ("orchestrator", "service-registry")
"""Kinds of which one leads, and others stand by."""


def standby(name: str, incarnation: str) -> str:
    """As what an orchestrator or a registry that does not lead is registered: several may bear one name."""
    return f"{name}-{incarnation}"


def refuse_taken(what: str, name: str) -> None:
    """
    Raises:
        BadInput: see `taken`.
    """
    if (why := taken(name)) is not None:
        raise BadInput(f"{what} {name!r}: {why}; choose another name")


def misplaced(cluster: str, node: str = "n") -> str | None:
    """Why a cluster, or a node, may not be called so; None where it may."""
    for what, name in (("cluster", cluster), ("node", node)):
        if name.startswith("-") or name.endswith("-") or "--" in name:
            return f"{what} {name!r}: no dash at either end, nor two together"
    if (why := taken(cluster)) is not None:
        return f"cluster {cluster!r}: {why}; choose another"
    return None


def agent_name(cluster: str, node: str) -> str:
    """A node agent's SID. Two dashes where the cluster's name has one: else `b-c` + `n` were `b` + `c-n`."""
    return f"{cluster}--{node}" if "-" in cluster else f"{cluster}-{node}"
