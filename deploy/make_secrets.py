"""Fills a folder with a mesh's secrets, once: keys for the authorizers, credentials for all other parts.

    python make_secrets.py /run/dmsc

Each subfolder is a volume of its own, which only those containers have that need it:

    aam/       the authorizers: their keys, the users, the root of all credentials
    control/   the rest of the control plane: a file of credentials each
    modules/   functional modules, the tracer and the tracker: a credential each
    nodes/     the node agents, whose instances run users' code: leave to join, cluster by cluster
    clusters/  containers with a whole cluster each: leave to join with any
    client/    people's commands: the administrator's token
    server/    NATS: its part of the configuration; public keys alone

What is there stays, so that a restart changes nothing, unless it is for others than it was made for.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from bus.guard.guard_keys import GuardKeys, guarded_clause
from bus.security.credentials import Credential, issue
from bus.security.identity import ANY, Identity
from dmsc.process.policy_loading import DEFAULT_POLICIES
from dmsc.state import identities
from dmsc.state.state_folder import StateFolder, write_private
from schemas.envelope import EntityKind

CLUSTERS = ("a", "b")
BROKERS = ("broker", "broker-2")
AUTHORIZERS = ("authorizer", "authorizer-2")


def main() -> None:
    """Writes what is missing."""
    top = Path(sys.argv[1])
    folder = StateFolder(top / "aam")
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_tokens()
    root = folder.bus_token() or ""

    def give(place: str, name: str, whom: Sequence[Identity]) -> None:
        path = top / place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or _holders(path) != list(whom):
            write_private(path, " ".join(issue(root, one) for one in whom) + "\n")

    for name in ("service-registry", "orchestrator", "accountant", "model-registry", "provisioner"):
        give("control", name, identities.entities((name,), ()))
    for name in AUTHORIZERS:
        give(
            "aam", name, identities.entities(("authorizer",), (), identities.CalledEntities(authorizer=name))
        )
    for name in BROKERS:
        give("control", name, identities.entities(("broker",), (), identities.CalledEntities(broker=name)))
    for cluster in CLUSTERS:
        for kind in ("gateway", "router"):
            give("control", f"{kind}-{cluster}", identities.entities((kind,), (cluster,)))
        give("nodes", f"node-{cluster}", [_leave_to_join(cluster)])
    give("modules", "policy", [identities.module(source) for source in DEFAULT_POLICIES])
    give("modules", "tracer", [identities.module("tracer")])
    give("modules", "tracker", [identities.module("tracker")])
    give("clusters", "cluster", [_leave_to_join(ANY)])
    client = top / "client" / "token"
    client.parent.mkdir(exist_ok=True)
    if not client.exists():
        shutil.copy2(folder.path / "token", client)
    clause = top / "server" / "nats-auth.conf"
    clause.parent.mkdir(exist_ok=True)
    clause.write_text("\n".join(guarded_clause(GuardKeys.read(folder.guard_file))) + "\n")
    print(f"secrets are in {top}")


def _holders(path: Path) -> list[Identity]:
    """Whom the credentials in a file are for."""
    return [Credential.parse(text).identity for text in path.read_text().split()]


def _leave_to_join(cluster: str) -> Identity:
    name = "join" if cluster == ANY else f"join-{cluster}"
    return Identity(name=name, kind=EntityKind.CLUSTER, cluster=cluster, node=ANY)


if __name__ == "__main__":
    main()
