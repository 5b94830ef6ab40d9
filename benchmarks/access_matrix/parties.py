"""Who attacks: one of each kind of credential, as the mesh hands them out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.access_matrix import effects
from benchmarks.access_matrix.effects import Effects
from bus.security.credentials import delegate, issue
from bus.security.identity import ANY, Identity
from schemas.envelope import EntityKind as K
from schemas.signals import Role

BROKERS = f"{effects.ROOT}broker."
TOKENS = {role: f"the token of a {role}" for role in Role}
AGENT = Identity(name="a-n", kind=K.CLUSTER, cluster="a", node="n")
INSTANCE = Identity(name="j-s0-r0", kind=K.INSTANCE, cluster="a", node="n", job="j")


@dataclass(frozen=True)
class Party:
    """`token` makes what it shows, from the mesh's root; `name` is what it says it is called. `kind` and
    `label` are how its inbox is called."""

    title: str
    name: str
    kind: str
    label: str
    effects: Effects
    token: Callable[[str], str]

    @property
    def says(self) -> tuple[str, ...]:
        return effects.patterns(self.effects.says, self.label)

    @property
    def learns(self) -> tuple[str, ...]:
        return effects.patterns(self.effects.learns, self.label)

    @property
    def writes(self) -> tuple[str, ...]:
        return effects.patterns(self.effects.writes, self.label)

    @property
    def beyond(self) -> tuple[str, ...]:
        return effects.patterns(self.effects.beyond, self.label)

    @property
    def asks_as(self) -> tuple[str, ...]:
        """Where it asks brokers."""
        return tuple(said for said in self.says if said.startswith(BROKERS))

    @property
    def inboxes(self) -> tuple[str, ...]:
        """Where its answers may come: by kind and name, and by name alone."""
        return f"_INBOX.{self.kind}.{self.label}", f"_INBOX.{self.label}"


def _user(role: Role, allowed: Effects, name: str = "", title: str = "") -> Party:
    token = TOKENS[role]
    label = hashlib.sha256(token.encode()).hexdigest()[:20]
    return Party(title or str(role), name or f"laptop-of-{role}", "user", label, allowed, lambda root: token)


def _entity(title: str, who: Identity, allowed: Effects) -> Party:
    def token(root: str) -> str:
        if who.kind is K.INSTANCE:
            made = delegate(issue(root, AGENT), who)
            assert made is not None
            return made
        return issue(root, who)

    return Party(title, who.name, str(who.kind), who.name, allowed, token)


PARTIES = (
    _user(Role.VIEWER, effects.VIEWER),
    _user(Role.RESEARCHER, effects.RESEARCHER),
    _user(Role.RESEARCHER, effects.RESEARCHERS_MODULE, "researcher-bold", "researcher's module"),
    _user(Role.OPERATOR, effects.OPERATOR),
    _user(Role.ADMIN, effects.ADMIN),
    _entity("instance", INSTANCE, effects.INSTANCE),
    _entity("node agent", AGENT, effects.AGENT),
    _entity("module", Identity(name="mine", kind=K.FUNCTIONAL_MODULE, module="mine"), effects.MODULE),
    _entity(
        "module of a job",
        Identity(name="bound", kind=K.FUNCTIONAL_MODULE, module="bound", jobs=("j",)),
        effects.BOUND_MODULE,
    ),
    _entity("client", Identity(name="tool", kind=K.CLIENT), effects.TOOL),
    _entity(
        "join credential",
        Identity(name="join-a", kind=K.CLUSTER, cluster="a", node=ANY),
        effects.JOINS_A,
    ),
    _entity(
        "join credential of any cluster",
        Identity(name="join-any", kind=K.CLUSTER, cluster=ANY, node=ANY),
        effects.JOINS_ANY,
    ),
    _entity("gateway", Identity(name="gateway-a", kind=K.GATEWAY, cluster="a"), effects.GATEWAY),
    _entity("router", Identity(name="router-a", kind=K.ROUTER, cluster="a"), effects.ROUTER),
)
