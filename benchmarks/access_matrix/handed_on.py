"""Credentials that nobody may hand on: each is signed with a key that its giver has, and must open nothing.

`bus.security.credentials.delegate` would refuse to make most of them; an attacker asks nobody, so the chain
is signed here link by link. That the giver's own credential opens the door is looked at first.
"""

from __future__ import annotations

import time

from benchmarks.access_matrix.parties import AGENT, INSTANCE
from benchmarks.access_matrix.trial import Findings, Wrong
from benchmarks.access_matrix.wire import Shut, wire
from benchmarks.access_matrix.world import World
from bus.security import nats_jwt
from bus.security.credentials import TYPE, Credential, issue
from bus.security.identity import ANY, Identity
from bus.security.nats_jwt import SigningKeys
from schemas.envelope import EntityKind as K

TITLE = "handed-on credentials"
JOINS_A = Identity(name="join-a", kind=K.CLUSTER, cluster="a", node=ANY)
JOINS_ANY = Identity(name="join-any", kind=K.CLUSTER, cluster=ANY, node=ANY)
MODULE = Identity(name="mine", kind=K.FUNCTIONAL_MODULE, module="mine")
ENTITIES = (
    *("orchestrator", "service-registry", "authorizer", "authorizer-2", "gateway-a", "router-a", "broker"),
    *("supervisor", "guard", "accountant", "model-registry"),
)


def _instance(name: str, job: str = "j", **fields: str) -> dict[str, str]:
    where = {"cluster": "a", "node": "n"} | fields
    return {"name": name, "kind": "instance", "job": job, **where}


_IN_BETWEEN = [_instance(name) for name in ENTITIES] + [
    *(_instance(f"{name}-s0-r0", name) for name in ENTITIES),  # a job that is called like an entity
    *(_instance(name, "k") for name in ("j-s0-r0", "gateway-a", "k")),
    *(_instance(name) for name in ("k-s0-r0", "j", "js0", "another", "mine", "a-n", "b-n")),
    *(
        _instance("j-s0-r0", **one)
        for one in ({"node": "m"}, {"cluster": "b"}, {"node": ANY}, {"cluster": ANY})
    ),
    _instance("j-s0-r0", ANY),
    {"name": "a-n", "kind": "cluster", "cluster": "a", "node": "n"},
    {"name": "b-n", "kind": "cluster", "cluster": "b", "node": "n"},
    {"name": "gateway-a", "kind": "gateway", "cluster": "a"},
    {"name": "orchestrator", "kind": "orchestrator"},
    {"name": "broker", "kind": "broker"},
    {"name": "accountant", "kind": "accountant"},
    {"name": "tap", "kind": "tap"},
    {"name": "tool", "kind": "client"},
    {"name": "mine", "kind": "functional-module", "module": "mine"},
]
_BY_JOINING = [
    {"name": "b-n", "kind": "cluster", "cluster": "b", "node": "n"},
    {"name": "orchestrator", "kind": "cluster", "cluster": "a", "node": "n"},
    {"name": "a-n", "kind": "cluster", "cluster": "a", "node": ANY},
    {"name": "a-n", "kind": "cluster", "cluster": ANY, "node": "n"},
    *(_instance(name) for name in ("j-s0-r0", "gateway-a")),
    *({"name": name, "kind": "gateway", "cluster": "a"} for name in ("gateway-b", "orchestrator")),
    *(
        {"name": name, "kind": name}
        for name in ("orchestrator", "authorizer", "service-registry", "broker", "tap")
    ),
    {"name": "tool", "kind": "client"},
    {"name": "mine", "kind": "functional-module", "module": "mine"},
]
TRIED: tuple[tuple[Identity, list[dict[str, str]]], ...] = (
    (AGENT, _IN_BETWEEN),
    (INSTANCE, [_instance("j-s1-r0"), _instance("j-s0-r0"), {"name": "tool", "kind": "client"}]),
    (MODULE, [_instance("j-s0-r0"), {"name": "mine", "kind": "functional-module", "module": "mine"}]),
    (JOINS_A, [*_BY_JOINING, {"name": "gateway-a", "kind": "gateway", "cluster": "a"}]),
    (JOINS_ANY, [one for one in _BY_JOINING if one.get("cluster") != "b"]),
)
ENDED = _instance("ended-s0-r0", "ended")
"""Of a job that has ended."""
UNKNOWN = _instance("never-s0-r0", "never")
"""Of a job of which there is no record."""


async def run(world: World) -> Findings:
    """All of them."""
    found = Findings()
    for giver, claimed in TRIED:
        own = Credential.parse(issue(world.root, giver))
        if not await _opens(world, own):
            found.wrong.append(Wrong(TITLE, f"{giver.name} itself", "it is not let in"))
        for claims in claimed:
            found.probes[TITLE] += 1
            if await _opens(world, signed(own, claims)):
                found.wrong.append(Wrong(TITLE, f"{giver.name} signs {claims}", "it is let in"))
    found.probes[TITLE] += 1
    if await _opens(world, signed(Credential.parse(issue(world.root, AGENT)), ENDED)):
        found.wrong.append(Wrong(TITLE, "an instance of a job that has ended", "it is let in"))
    found.probes[TITLE] += 1
    if await _opens(world, signed(Credential.parse(issue(world.root, AGENT)), UNKNOWN)):
        found.wrong.append(Wrong(TITLE, "an instance of a job that has no record", "it is let in"))
    return found


def signed(giver: Credential, claims: dict[str, str]) -> Credential:
    """What nobody checks before it is shown."""
    keys = SigningKeys.user()
    now = int(time.time())
    link = nats_jwt.encode(
        {
            "type": TYPE,
            "iss": giver.keys.public,
            "sub": keys.public,
            "iat": now,
            "exp": now + 3_600,
            "jti": f"forged-{keys.public[:12]}",
            "id": claims,
        },
        giver.keys,
    )
    return Credential((*giver.chain, link), keys)


async def _opens(world: World, credential: Credential) -> bool:
    try:
        async with wire(world.url, credential.text):
            return True
    except Shut:
        return False
