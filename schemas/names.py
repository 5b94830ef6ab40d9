"""The rules of names: entities, agents, instances, modules and users share one space of SIDs.

A subject says `…heartbeat.<SID>`, but not the kind of the SID, so each kind has names that no other can have:

    the control plane   its kind, or kind and cluster: `orchestrator`, `gateway-a`
    an instance         its job and a dash: `j1a2b3c-s0-r1`. Only a job's id looks like `j1a2b3c`, or like
                        `r1a2b3c_7`, which is the eighth job of the array `r1a2b3c`
    a node agent        cluster and node: `a-n`, `b-c--n` (`agent_name`)
    a module            its policy's name, or the name of the user who runs it; no user has a cluster's name
"""

from __future__ import annotations

import re

from schemas.errors import BadInput

RESERVED = (
    *("service-registry", "registry", "gateway", "authorizer", "router", "orchestrator", "broker"),
    "accountant",
    "model-registry",
    "provisioner",
    *("supervisor", "guard", "system", "join", "jetstream"),
)
"""Names of the control plane, and words that take their place."""

MESH = "system"
"""In the place of a user's name, for functional modules of no user; no user may have this name."""

_job = re.compile(r"[jr][0-9a-f]{6}(_[0-9]{1,4})?")
_array = re.compile(r"r[0-9a-f]{6}")
ARRAY_LETTER = "r"
"""The ids of arrays of jobs begin with it: nobody has to ask whether an id is a job's or an array's."""


def is_array(id: str) -> bool:
    """Whether this is an array's id, and not a job's."""
    return _array.fullmatch(id) is not None


def member_id(array: str, index: int) -> str:
    """The id of a member's job."""
    return f"{array}_{index}"


def job_of(sid: str) -> str:
    """The job of an instance's SID: job ids have no dash."""
    return sid.partition("-")[0]


def module_of(sid: str) -> str:
    """The functional module of a module process's SID; a shadow's SID is like `mine-shadow-2`."""
    return sid.partition("-shadow-")[0] or sid


def is_users(module: str, user: str) -> bool:
    """Whether a functional module bears this user's name, as the user's own modules do: `ann`, `ann-…`."""
    return module == user or module.startswith(f"{user}-")


def taken(name: str) -> str | None:
    """Why only its owner may have this name; None if anybody may."""
    if (why := reserved(name)) is not None:
        return why
    if _job.fullmatch(job_of(name.lower())):
        return f"{job_of(name)!r} is what jobs are called"
    return None


def reserved(name: str) -> str | None:
    """Why the name is reserved for the control plane; None if it is not. Instances must respect it, too."""
    lowered = name.lower()
    for word in RESERVED:
        if lowered == word or lowered.startswith(f"{word}-"):
            return f"{word!r} is the name of a part of the mesh"
    return None


STANDING = ("orchestrator", "service-registry", "provisioner")
"""Kinds of services of which one leads and others stand by."""


def standby(name: str, incarnation: str) -> str:
    """The SID of a service that stands by: several of one kind may have one name."""
    return f"{name}-{incarnation}"


def refuse_taken(what: str, name: str) -> None:
    """Check that a name may be given to a user or another party.

    Raises:
        BadInput: see `taken`.
    """
    if (why := taken(name)) is not None:
        raise BadInput(f"{what} {name!r}: {why}; choose another name")


def misplaced(cluster: str, node: str = "n") -> str | None:
    """Why a cluster or a node may not have this name; None if it may."""
    for what, name in (("cluster", cluster), ("node", node)):
        if name.startswith("-") or name.endswith("-") or "--" in name:
            return f"{what} {name!r}: no dash at either end, nor two together"
    if (why := taken(cluster)) is not None:
        return f"cluster {cluster!r}: {why}; choose another"
    return None


def agent_name(cluster: str, node: str) -> str:
    """A node agent's SID. Two dashes if the cluster's name has one: else `b-c`+`n` would equal `b`+`c-n`."""
    return f"{cluster}--{node}" if "-" in cluster else f"{cluster}-{node}"


def node_of(sid: str, cluster: str) -> str:
    """The node in a node agent's SID."""
    return sid[len(agent_name(cluster, "")) :]
