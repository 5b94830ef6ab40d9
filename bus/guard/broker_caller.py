"""The asker of a broker, identified by tokens of the subject, which the server binds to the identity."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from bus.nats.reply_subjects import USER, inbox_of
from bus.security.identity import ANY, Identity
from bus.subject_row import ROOT
from schemas.envelope import EntityKind as K
from schemas.signals import Role

BROKER = f"{ROOT}.broker"
EVERY = "~"
"""In place of a job, cluster or module: all of them (for the mesh's owner), or none. No name contains it."""
OWNER = "owner"
"""The kind of users who run modules: a broker queries the stores of their own jobs for them."""
BELOW = frozenset({K.INSTANCE, K.CLUSTER, K.FUNCTIONAL_MODULE, K.CLIENT})
"""The kinds that ask a broker. The control plane and its owner's taps ask the server itself."""
CONSUMER_BYTES = 8
"""Random bytes in the name of a consumer."""


@dataclass(frozen=True, slots=True)
class BrokerCaller:
    """An asker: `kind` is an entity's kind, `USER` or `OWNER`; `scope` is the job, cluster, module, role or
    user; `name` is the SID, or the name of a user's inbox."""

    kind: str
    scope: str
    name: str

    @property
    def subject(self) -> str:
        """The subject on which it asks; nobody else may publish there."""
        return f"{BROKER}.{self.kind}.{self.scope}.{self.name}"

    @property
    def consumers(self) -> str:
        """The prefix of its consumers' names."""
        return f"b{hashlib.sha256(self.subject.encode()).hexdigest()[:20]}x"

    @property
    def party(self) -> str:
        """The party that takes turns in the broker's queue: all instances of a job, or all modules of a user,
        are one party."""
        return f"{self.kind}.{self.scope if self.kind in (K.INSTANCE, OWNER) else self.name}"

    @property
    def inbox(self) -> str:
        """The prefix of its inboxes."""
        return inbox_of(USER if self.kind == OWNER else self.kind, self.name)

    def may_be_answered_at(self, reply: str) -> bool:
        """Whether a reply subject is an inbox of this asker."""
        tokens = reply.split(".")
        plain = all(token and token.isascii() and token not in ("*", ">") for token in tokens)
        return plain and reply.startswith(f"{self.inbox}.")

    @classmethod
    def of_subject(cls, subject: str) -> BrokerCaller | None:
        """The asker on a subject; None if the subject is not one for requests to brokers."""
        tokens = subject.removeprefix(f"{BROKER}.").split(".")
        return cls(*tokens) if subject.startswith(f"{BROKER}.") and len(tokens) == 3 else None

    @classmethod
    def of_owner(cls, user: str, inbox: str) -> BrokerCaller:
        """The asker for a user's own jobs; `inbox` is the prefix of the user's inboxes."""
        return cls(OWNER, user, inbox.rpartition(".")[2])

    @classmethod
    def of_identity(cls, identity: Identity) -> BrokerCaller:
        """The asker for an identity below the control plane."""
        scope = {
            K.INSTANCE: identity.job,
            K.CLUSTER: identity.cluster,
            K.FUNCTIONAL_MODULE: identity.module,
        }.get(identity.kind, "")
        return cls(identity.kind, EVERY if scope in ("", ANY) else scope, identity.name)

    def identity(self) -> Identity | None:
        """The identity of the asker; None for a user.

        Raises:
            BadInput, ValueError: there is no such identity.
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
    """The askers as which a user of this role may ask; each request uses the least role that suffices."""
    everything = role in (Role.OPERATOR, Role.ADMIN)
    roles = (Role.VIEWER, Role.OPERATOR) if everything else (Role.VIEWER,)
    return tuple(BrokerCaller(USER, asker_role, inbox.rpartition(".")[2]) for asker_role in roles)
