"""Which identities the processes of a mesh have, and the credentials that they are given."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

from bus.security.identity import ANY, Identity, is_credential, is_root
from schemas.base import is_token
from schemas.envelope import EntityKind
from schemas.errors import BadInput
from schemas.names import agent_name


def agent(cluster: str, node: str) -> Identity:
    """A node agent."""
    return Identity(name=agent_name(cluster, node), kind=EntityKind.CLUSTER, cluster=cluster, node=node)


def called(names: Sequence[str], name: str | None) -> tuple[str, str]:
    """The authorizer's and the broker's name in a process that runs these, and may be given `--name`: that is
    the authorizer's, if there is one."""
    if name is None:
        return "authorizer", "broker"
    return (name, "broker") if "authorizer" in names else ("authorizer", name)


def entities(
    names: Iterable[str],
    clusters: Sequence[str],
    *,
    authorizer: str = "authorizer",
    broker: str = "broker",
) -> tuple[Identity, ...]:
    """What `dmsc run NAMES --cluster …` runs. Functional modules are not among them: see `module`.

    Raises:
        BadInput: an authorizer or broker that is called like nothing of the kind; the registry takes no such.
    """
    alone = {
        "service-registry": EntityKind.SERVICE_REGISTRY,
        "authorizer": EntityKind.AUTHORIZER,
        "orchestrator": EntityKind.ORCHESTRATOR,
        "broker": EntityKind.BROKER,
    }
    several = {"authorizer": authorizer, "broker": broker}
    for name, called in several.items():
        if called != name and not called.startswith(f"{name}-"):
            raise BadInput(f"--name {called!r}: {name}s are called {name} or {name}-…; choose such a name")
    of_clusters = {"gateway": EntityKind.GATEWAY, "router": EntityKind.ROUTER}
    found: list[Identity] = []
    for name in names:
        if name in alone:
            found.append(Identity(name=several.get(name, name), kind=alone[name]))
        elif name in of_clusters:
            found += [
                Identity(name=f"{name}-{cluster}", kind=of_clusters[name], cluster=cluster)
                for cluster in clusters
            ]
    return tuple(found)


def module(source: str) -> Identity:
    """The functional module of a built-in policy's name or a file, which is read and not run.

    Where the file does not plainly say its policy's name, it may speak as any module.
    """
    path, _, wanted = source.rpartition(":") if ".py:" in source else (source, "", "")
    name = source if is_token(source) else _declared(Path(path), wanted)
    return Identity(name=name or "module", kind=EntityKind.FUNCTIONAL_MODULE, module=name or ANY)


def _declared(path: Path, wanted: str) -> str | None:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None  # told by the process that runs it
    names = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or (wanted and node.name != wanted):
            continue
        for line in node.body:
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            value = getattr(line, "value", None)
            named = any(isinstance(target, ast.Name) and target.id == "name" for target in targets)
            if named and isinstance(value, ast.Constant) and isinstance(value.value, str):
                names.append(value.value)
    return names[0] if len(names) == 1 and is_token(names[0]) else None


def credentials(token: str | None, identities: Iterable[Identity], before: Sequence[str] = ()) -> str:
    """What a process of these identities is given in place of the mesh's root; a plain token as it is.
    `before`: the roots that this one has replaced."""
    if token is None or not is_root(token):
        return token or ""
    from bus.security.credentials import issue

    return " ".join(issue(token, identity, before=before) for identity in identities)


def own(token: str | None, identities: Sequence[Identity]) -> str | None:
    """What a process of these identities shows, of what it was given: a root and a key to join are narrowed,
    its own credentials and a plain token stay.

    Raises:
        BadInput: it was given somebody else's credential.
    """
    if token is None or not (is_root(token) or is_credential(token)) or len(token.split()) > 1:
        return token
    if is_root(token):
        return credentials(token, identities)
    from bus.security.credentials import Credential, delegate, may_hand_on

    given = Credential.parse(token).identity
    made = [
        token if given.name == one.name else delegate(token, one)
        for one in identities
        if given.name == one.name or may_hand_on(given, one)
    ]
    if len(made) < len(identities):
        wanted = ", ".join(one.name for one in identities)
        raise BadInput(
            f"the credential for the bus is that of {given.kind} {given.name}, and this is {wanted}: "
            "make one with `dmsc credential`"
        )
    return " ".join(one or "" for one in made)
