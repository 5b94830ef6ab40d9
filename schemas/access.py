"""Users of the mesh, their tokens as the AAM keeps them, and explanations of rules (draft §3 AAM)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from schemas.base import Message, Part, Seconds, Time, Token
from schemas.marks import SECRET, Secret
from schemas.quota import Quota, QuotaUse
from schemas.signals import Role

UserOp = Literal["add", "list", "token", "revoke", "remove"]


class IssuedToken(Part):
    """The record of a token, without the token itself. Times are seconds since the epoch."""

    id: Token
    issued_at: Time
    expires_at: Time
    by: str


class UserRecord(Part):
    """A user of the mesh. The role in this record counts, whenever a token was issued."""

    name: Token
    role: Role
    created_at: Time
    created_by: str
    tokens: tuple[IssuedToken, ...] = ()


class StoredUser(Message, wire="access.user", version=(1, 1)):
    """A user's record in the bucket `users`, sealed to the authorizers against other readers of the bucket.

    Versions before 1.1 wrote `role` and the rest in the clear; so does a mesh without a guard.
    """

    name: Token
    sealed: str = Field("", description="the record as JSON")
    role: Role | None = None
    created_at: Time = 0.0
    created_by: str = ""
    tokens: tuple[IssuedToken, ...] = ()


class Revocation(Message, wire="access.revocation", version=(1, 1)):
    """A revocation, in effect at once: of a token, of a user's tokens issued up to `at`, or of a credential.

    Credentials are revoked since version 1.1, together with all that were signed with them; `user` is the
    owner. The key in the bucket `revocations` is `token.<its id>`, `user.<its name>` or `credential.<its
    id>`. A revocation expires once everything that it concerns has expired.
    """

    kind: Literal["token", "user", "credential"]
    id: Token
    user: str
    at: Time
    by: str
    reason: str = ""


class UserCommand(Message, wire="access.user.command", version=(1, 1)):
    """MG → AAM: change or list users for the bearer of `token`, if the rules allow it.

    `revoke` concerns the token `token_id`, or all of the user's tokens without it. `expires_s` is the
    lifetime of a new token. The answer is sealed to `answer_key`.
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
    """A user in `dmsc user list`. `source` is `mesh` (tokens expire) or `file` (the users' file)."""

    name: str
    role: Role
    source: Literal["mesh", "file"]
    created_at: Time | None = None
    created_by: str = ""
    tokens: tuple[IssuedToken, ...] = ()
    revoked: bool = False


class SealedAnswer(Message, wire="access.user.sealed"):
    """A `UserAnswer` as JSON, sealed to the key that the command named, because inboxes may be overheard."""

    sealed: str


def answer_about(key: str) -> bytes:
    """The context that a sealed answer is bound to."""
    return f"user answer to {key}".encode()


class UserAnswer(Message, wire="access.user.answer"):
    """The users after the command, and the new token if one was requested: it is never shown again."""

    users: tuple[UserInfo, ...] = ()
    token: Annotated[str | None, Field(repr=False), SECRET] = None
    issued: IssuedToken | None = None
    note: str = ""


class ExplainAccess(Message, wire="access.explain"):
    """MG → AAM: may this user do that, and by which rule? An empty `user` means the bearer of `token`."""

    token: Secret
    gateway: Token
    user: str = ""
    action: str = Field(max_length=200)
    resource: str = Field("", max_length=512)


class RuleView(Part):
    """A rule, and why it does or does not decide."""

    name: str
    line: int
    decides: bool
    why: str


class AccessExplanation(Message, wire="access.explanation"):
    """The decision, the rules in order up to the one that decides, and the owner of the resource."""

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


class WhoAmI(Message, wire="access.whoami", version=(1, 2)):
    """The user of a token, with quota and use. `expires_at` is None for tokens of the users' file."""

    user: str
    role: Role
    expires_at: Time | None = None
    quota: Quota | None = Field(None, description="the most that they may have at a time; None: no limit")
    use: QuotaUse = QuotaUse()
