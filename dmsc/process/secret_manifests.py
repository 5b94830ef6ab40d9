"""A mesh's secrets as Secrets of Kubernetes: a part has its own, and no other.

What `deploy/make_secrets.py` gives containers as volumes, `dmsc secrets --kubernetes` prints from a state
folder; the chart names these objects and never has their contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bus.guard.guard_keys import GuardKeys, guarded_clause
from bus.security.credentials import issue
from bus.security.identity import ANY, Identity
from dmsc.process.policy_loading import DEFAULT_POLICIES
from dmsc.state import identities
from dmsc.state.state_folder import StateFolder
from schemas.envelope import EntityKind

ENTITIES = ("service-registry", "orchestrator", "accountant", "model-registry", "provisioner")
AUTHORIZERS = ("authorizer", "authorizer-2")
BROKERS = ("broker", "broker-2")
CREDENTIAL = "credential"


def secret_manifests(
    state: StateFolder, clusters: Sequence[str], prefix: str, namespace: str
) -> Iterator[dict[str, Any]]:
    """The Secrets of a mesh, one after another.

    Args:
        state: has the keys, the users and the root of all credentials.
        clusters: whose gateways, routers and nodes get credentials.
        prefix: begins the Secrets' names.
        namespace: empty: none is named.
    """
    root = state.bus_token() or ""

    def secret(name: str, contents: dict[str, str]) -> dict[str, Any]:
        place = {"namespace": namespace} if namespace else {}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": f"{prefix}-{name}",
                **place,
                "labels": {"app.kubernetes.io/name": "dmsc"},
            },
            "type": "Opaque",
            "stringData": contents,
        }

    def credential(whom: Sequence[Identity]) -> dict[str, str]:
        return {CREDENTIAL: " ".join(issue(root, each) for each in whom)}

    for name in ENTITIES:
        yield secret(name, credential(identities.entities((name,), ())))
    for name in BROKERS:
        called = identities.CalledEntities(broker=name)
        yield secret(name, credential(identities.entities(("broker",), (), called)))
    for name in AUTHORIZERS:
        called = identities.CalledEntities(authorizer=name)
        own = {
            "tokens.yaml": state.tokens_file.read_text(),
            "user_key": (state.path / "user_key").read_text(),
            "guard.json": state.guard_file.read_text(),
        }
        yield secret(name, own | credential(identities.entities(("authorizer",), (), called)))
    for cluster in clusters:
        for kind in ("gateway", "router"):
            yield secret(f"{kind}-{cluster}", credential(identities.entities((kind,), (cluster,))))
        joins = Identity(name=f"join-{cluster}", kind=EntityKind.CLUSTER, cluster=cluster, node=ANY)
        yield secret(f"node-{cluster}", credential([joins]))
    yield secret("policy", credential([identities.module(source) for source in DEFAULT_POLICIES]))
    yield secret("client", {"token": state.token() or ""})
    clause = "\n".join(guarded_clause(GuardKeys.read(state.guard_file))) + "\n"
    yield secret("bus", {"nats-auth.conf": clause})
