"""The identities of a mesh's processes on the bus, and the credentials that they get."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bus.security.identity import ANY, Identity, is_credential, is_root
from schemas.base import is_token
from schemas.envelope import EntityKind
from schemas.errors import BadInput
from schemas.names import agent_name


def agent(cluster: str, node: str) -> Identity:
    """The identity of a node agent."""
    return Identity(name=agent_name(cluster, node), kind=EntityKind.CLUSTER, cluster=cluster, node=node)


@dataclass(frozen=True, kw_only=True)
class CalledEntities:
    """The names of the entities of which a mesh may have several, each called as its kind or `KIND-…`."""

    authorizer: str = "authorizer"
    broker: str = "broker"
    model_registry: str = "model-registry"


def called(names: Sequence[str], name: str | None) -> CalledEntities:
    """The names of authorizer, broker and model registry in a process that runs the entities `names`.

    `name` is the option `--name`: it is the authorizer's name if the process runs one, else the broker's or
    the model registry's.
    """
    if name is None:
        return CalledEntities()
    if "authorizer" in names:
        return CalledEntities(authorizer=name)
    if "model-registry" in names and "broker" not in names:
        return CalledEntities(model_registry=name)
    return CalledEntities(broker=name)


def entities(
    names: Iterable[str],
    clusters: Sequence[str],
    called: CalledEntities = CalledEntities(),
) -> tuple[Identity, ...]:
    """The identities of what `dmsc run NAMES --cluster …` runs, except functional modules; see `module`.

    Raises:
        BadInput: A name lacks its kind's prefix; the registry would refuse it.
    """
    several = {
        "authorizer": called.authorizer,
        "broker": called.broker,
        "model-registry": called.model_registry,
    }
    for name, given in several.items():
        if given != name and not given.startswith(f"{name}-"):
            kinds = "model registries" if name == "model-registry" else f"{name}s"
            raise BadInput(f"--name {given!r}: {kinds} are called {name} or {name}-…; choose such a name")
    identities: list[Identity] = []
    for name in names:
        if name in (
            "service-registry",
            "authorizer",
            "orchestrator",
            "broker",
            "accountant",
            "model-registry",
            "provisioner",
        ):
            identities.append(Identity(name=several.get(name, name), kind=EntityKind(name)))
        elif name in ("gateway", "router"):
            identities += [
                Identity(name=f"{name}-{cluster}", kind=EntityKind(name), cluster=cluster)
                for cluster in clusters
            ]
    return tuple(identities)


def module(source: str) -> Identity:
    """The identity of a functional module: of a built-in policy's name, or of a file.

    The file is parsed, not run. If it does not state one policy's name as a constant, the identity may act as
    any module.
    """
    path, _, class_name = source.rpartition(":") if ".py:" in source else (source, "", "")
    name = source if is_token(source) else _declared(Path(path), class_name)
    return Identity(name=name or "module", kind=EntityKind.FUNCTIONAL_MODULE, module=name or ANY)


def _declared(path: Path, class_name: str) -> str | None:
    """The policy's name in a file, if the file (or the class in it) states exactly one."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None  # the process that runs the file will report the error
    names = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or (class_name and node.name != class_name):
            continue
        for line in node.body:
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            value = getattr(line, "value", None)
            named = any(isinstance(target, ast.Name) and target.id == "name" for target in targets)
            if named and isinstance(value, ast.Constant) and isinstance(value.value, str):
                names.append(value.value)
    return names[0] if len(names) == 1 and is_token(names[0]) else None


def credentials(token: str | None, identities: Iterable[Identity], before: Sequence[str] = ()) -> str:
    """The credentials that a process of these identities gets in place of the mesh's root.

    A plain token is returned unchanged. `before` has the roots that this root has replaced.
    """
    if token is None or not is_root(token):
        return token or ""
    from bus.security.credentials import issue

    return " ".join(issue(token, identity, before=before) for identity in identities)


def own(token: str | None, identities: Sequence[Identity]) -> str | None:
    """The credentials with which a process of these identities connects, derived from the token that it got.

    A root and a credential for joining are narrowed to these identities. The process's own credentials and a
    plain token are returned unchanged.

    Raises:
        BadInput: The token is the credential of another process.
    """
    if token is None or not (is_root(token) or is_credential(token)) or len(token.split()) > 1:
        return token
    if is_root(token):
        return credentials(token, identities)
    from bus.security.credentials import Credential, delegate, may_hand_on

    holder = Credential.parse(token).identity
    texts = [
        token if holder.name == identity.name else delegate(token, identity)
        for identity in identities
        if holder.name == identity.name or may_hand_on(holder, identity)
    ]
    if len(texts) < len(identities):
        names = ", ".join(identity.name for identity in identities)
        raise BadInput(
            f"the credential for the bus is that of {holder.kind} {holder.name}, and this is {names}: "
            "make one with `dmsc credential`"
        )
    return " ".join(text or "" for text in texts)
