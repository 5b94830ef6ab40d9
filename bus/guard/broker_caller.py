"""Who asks a broker: tokens of a subject that the server holds to the identity."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from bus.nats.reply_subjects import USER, inbox_of
from bus.security.identity import ANY, Identity
from bus.subject import ROOT
from schemas.envelope import EntityKind as K
from schemas.signals import Role

BROKER = f"{ROOT}.broker"
EVERY = "~"
"""In place of a job, cluster or module: each of them (the mesh's owner), or none. Nobody's name has it."""
OWNER = "owner"
"""The kind of those for whom a broker asks the stores of their own jobs: users, who run modules."""
BELOW = frozenset({K.INSTANCE, K.CLUSTER, K.FUNCTIONAL_MODULE, K.CLIENT})
"""Who asks a broker. The control plane and its owner's taps ask the server."""
CONSUMER_BYTES = 8
"""Of the name of a consumer, at random."""


@dataclass(frozen=True, slots=True)
class BrokerCaller:
    """`kind` is an entity's, `USER` or `OWNER`, `scope` the job, cluster, module, role or user, `name` the
    SID, or the name of a user's inbox."""

    kind: str
    scope: str
    name: str

    @property
    def subject(self) -> str:
        """Where it asks; nobody else may."""
        return f"{BROKER}.{self.kind}.{self.scope}.{self.name}"

    @property
    def consumers(self) -> str:
        """How the names of its consumers begin."""
        return f"b{hashlib.sha256(self.subject.encode()).hexdigest()[:20]}x"

    @property
    def party(self) -> str:
        """Whose turn it is when it is this asker's: a job's instances, and a user's, are one."""
        return f"{self.kind}.{self.scope if self.kind in (K.INSTANCE, OWNER) else self.name}"

    @property
    def inbox(self) -> str:
        """What its inboxes begin with."""
        return inbox_of(USER if self.kind == OWNER else self.kind, self.name)

    def may_be_answered_at(self, reply: str) -> bool:
        """Whether this is an inbox of its own."""
        tokens = reply.split(".")
        plain = all(token and token.isascii() and token not in ("*", ">") for token in tokens)
        return plain and reply.startswith(f"{self.inbox}.")

    @classmethod
    def of_subject(cls, subject: str) -> BrokerCaller | None:
        """Whose question this is; None where it is no question."""
        tokens = subject.removeprefix(f"{BROKER}.").split(".")
        return cls(*tokens) if subject.startswith(f"{BROKER}.") and len(tokens) == 3 else None

    @classmethod
    def of_owner(cls, user: str, inbox: str) -> BrokerCaller:
        """For a user's own jobs. `inbox`: the prefix of the user's inboxes."""
        return cls(OWNER, user, inbox.rpartition(".")[2])

    @classmethod
    def of_identity(cls, identity: Identity) -> BrokerCaller:
        """For everybody below the control plane."""
        scope = {
            K.INSTANCE: identity.job,
            K.CLUSTER: identity.cluster,
            K.FUNCTIONAL_MODULE: identity.module,
        }.get(identity.kind, "")
        return cls(identity.kind, EVERY if scope in ("", ANY) else scope, identity.name)

    def identity(self) -> Identity | None:
        """The identity that it speaks for; None of a user.

        Raises:
            BadInput, ValueError: there is none such.
        """
        if self.kind == USER:
            return None
        scope = ANY if self.scope == EVERY else self.scope
        kind = K(self.kind)
        fields: dict[K, dict[str, Any]] = {
            K.INSTANCE: {"job": scope, "cluster": ANY, "node": ANY},
            K.CLUSTER: {"cluster": scope, "node": ANY},
            K.FUNCTIONAL_MODULE: {"module": scope},
        }
        return Identity(name=self.name, kind=kind, **fields.get(kind, {}))


def callers_of_role(role: Role, inbox: str) -> tuple[BrokerCaller, ...]:
    """As whom a user of this role asks: a request is made as the least role that may make it."""
    everything = role in (Role.OPERATOR, Role.ADMIN)
    roles = (Role.VIEWER, Role.OPERATOR) if everything else (Role.VIEWER,)
    return tuple(BrokerCaller(USER, one, inbox.rpartition(".")[2]) for one in roles)
