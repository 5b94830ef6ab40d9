"""Users of the mesh and their tokens, as the AAM keeps them; the rules, explained (draft §3 AAM)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Part, Seconds, Time, Token
from schemas.marks import SECRET, Secret
from schemas.quota import Quota, QuotaUse
from schemas.signals import Role

UserOp = Literal["add", "list", "token", "revoke", "remove"]


class IssuedToken(Part):
    """What is kept of a token: everything but the token. Times are seconds since the epoch."""

    id: Token
    issued_at: Time
    expires_at: Time
    by: str


class UserRecord(Part):
    """A user of the mesh. The role that stands here counts, whenever a token was made."""

    name: Token
    role: Role
    created_at: Time
    created_by: str
    tokens: tuple[IssuedToken, ...] = ()


class StoredUser(Message, wire="access.user", version=(1, 1)):
    """A user's record in the bucket `users`: sealed to the authorizers, whoever may read the bucket.

    Versions before 1.1 wrote `role` and the rest in the clear; so does a mesh without a guard.
    """

    name: Token
    sealed: str = Field("", description="the record as JSON")
    role: Role | None = None
    created_at: Time = 0.0
    created_by: str = ""
    tokens: tuple[IssuedToken, ...] = ()


class Revocation(Message, wire="access.revocation", version=(1, 1)):
    """What opens nothing any more, from this moment on: one token, or all of a user's up to `at`; or, since
    version 1.1, one credential and all that were signed with it (`user` says whose it is).

    Key in the bucket `revocations`: `token.<its id>`, `user.<its name>` or `credential.<its id>`.
    It goes by itself once all that it concerns has expired.
    """

    kind: Literal["token", "user", "credential"]
    id: Token
    user: str
    at: Time
    by: str
    reason: str = ""


class UserCommand(Message, wire="access.user.command", version=(1, 1)):
    """MG → AAM: do something about users, for the bearer of `token`, if the rules allow it.

    `token_id` with `revoke`: that token alone; without: all of the user's. `expires_s`: of a new token.
    `answer_key`: the answer is sealed to it.
    """

    token: Secret
    gateway: Token
    op: UserOp
    name: str = ""
    role: Role | None = None
    token_id: Token | None = None
    expires_s: Seconds | None = Field(None, gt=0)
    reason: str = Field("", max_length=200)
    answer_key: str = Field("", pattern=r"^([0-9a-f]{64})?$")


class UserInfo(Part):
    """A user as `dmsc user list` shows it. `source`: `mesh` (tokens expire) or `file` (the users' file)."""

    name: str
    role: Role
    source: Literal["mesh", "file"]
    created_at: Time | None = None
    created_by: str = ""
    tokens: tuple[IssuedToken, ...] = ()
    revoked: bool = False


class SealedAnswer(Message, wire="access.user.sealed"):
    """A `UserAnswer` as JSON, sealed to the key that the command named: inboxes have listeners, too."""

    sealed: str


def answer_about(key: str) -> bytes:
    """Where a sealed answer stands."""
    return f"user answer to {key}".encode()


class UserAnswer(Message, wire="access.user.answer"):
    """Users after the command, and the new token where one was asked for: it is told this once."""

    users: tuple[UserInfo, ...] = ()
    token: Annotated[str | None, Field(repr=False), SECRET] = None
    issued: IssuedToken | None = None
    note: str = ""


class ExplainAccess(Message, wire="access.explain"):
    """MG → AAM: would this user be let do that, and by which rule? `user` empty: whoever asks."""

    token: Secret
    gateway: Token
    user: str = ""
    action: str = Field(max_length=200)
    resource: str = Field("", max_length=512)


class RuleView(Part):
    """A rule and why it does, or does not, decide here."""

    name: str
    line: int
    decides: bool
    why: str


class AccessExplanation(Message, wire="access.explanation"):
    """The decision, the rules in their order up to the one that decides, and whose the resource is."""

    user: str
    role: Role | None = None
    action: str
    resource: str
    allow: bool
    reason: str
    rule: str = ""
    owner: str | None = None
    audited: bool = False
    rules: tuple[RuleView, ...] = ()
    source: str = Field("", description="where the rules come from: a file, or the default")


class WhoAmI(Message, wire="access.whoami", version=(1, 1)):
    """Whose token it is, and how much of the mesh they have. `expires_at`: None for tokens of the file."""

    user: str
    role: Role
    expires_at: Time | None = None
    quota: Quota | None = Field(None, description="the most that they may have at a time; None: no limit")
    use: QuotaUse = QuotaUse()
