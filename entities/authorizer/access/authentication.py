"""Authentication (draft §3 AAM): from a token to a user, by the users' file or by this mesh's signature.

The file is the simple way; its tokens do not expire:

    users:
      - name: alice
        role: researcher
        token_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

The file has only hashes, so that a copy of it gives no access. `printf %s TOKEN | sha256sum` makes a hash.
`access_policy.py` decides what a user may do.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from nacl.signing import VerifyKey

from entities.authorizer.access import user_tokens
from entities.authorizer.access.user_tokens import TokenRefused
from schemas import names
from schemas.access import Revocation, UserRecord
from schemas.errors import BadInput
from schemas.signals import Role

_HASH = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """A user, identified by one of their tokens. Tokens of the file do not expire."""

    name: str
    role: Role
    token_sha256: str = ""
    token_id: str = ""
    issued_at: float = 0.0
    expires_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Users:
    """All users and revocations at a moment. Revocations are by token id, user name or credential id."""

    listed: tuple[User, ...] = ()
    records: Mapping[str, UserRecord] = field(default_factory=dict)
    revoked_tokens: Mapping[str, Revocation] = field(default_factory=dict)
    revoked_users: Mapping[str, Revocation] = field(default_factory=dict)
    revoked_credentials: Mapping[str, Revocation] = field(default_factory=dict)
    key: VerifyKey | None = None


def parse_users(text: str, where: str) -> tuple[User, ...]:
    """Read the file's text. Raises `BadInput` with one line: file, place, what to write instead."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise BadInput(f"{where}:{line} is not YAML ({getattr(error, 'problem', 'unreadable')})") from None
    if not isinstance(document, dict) or not isinstance(document.get("users"), list):
        raise BadInput(f"{where}: must have a key users with a list of name, role, token_sha256")
    users = tuple(
        _parse_user(entry, f"{where}: users[{index}]") for index, entry in enumerate(document["users"])
    )
    for key in ("name", "token_sha256"):
        values = [getattr(user, key) for user in users]
        for index, value in enumerate(values):
            if value in values[:index]:
                raise BadInput(
                    f"{where}: users[{index}].{key} is the same as in users[{values.index(value)}]"
                )
    return users


def _parse_user(entry: Any, place: str) -> User:
    if not isinstance(entry, dict):
        raise BadInput(f"{place}: must have name, role, token_sha256")
    if "token" in entry:
        raise BadInput(
            f"{place}.token: plain tokens are refused; give token_sha256 (printf %s TOKEN | sha256sum)"
        )
    unknown = sorted(map(str, entry.keys() - {"name", "role", "token_sha256"}))
    if unknown:
        raise BadInput(f"{place}.{unknown[0]}: unknown key; a user has name, role, token_sha256")
    name, role, token_sha256 = (entry.get(key) for key in ("name", "role", "token_sha256"))
    if not isinstance(name, str) or not name:
        raise BadInput(f"{place}.name: must be a text")
    if (reason := names.taken(name)) is not None:
        raise BadInput(f"{place}.name: {name!r}: {reason}; choose another")
    if role not in {known.value for known in Role}:
        raise BadInput(f"{place}.role: {role!r} is not one of {', '.join(known.value for known in Role)}")
    if not isinstance(token_sha256, str) or not _HASH.match(token_sha256):
        raise BadInput(f"{place}.token_sha256: must be 64 hexadecimal digits in lower case")
    return User(name=name, role=Role(role), token_sha256=token_sha256, token_id=token_sha256[:32])


@dataclass(frozen=True, slots=True)
class UnknownUser:
    """The answer to a token that is not valid. `name` is the user that a genuine token names.

    `missing` means that the token is genuine but its user is not known here: removed, or too new.
    """

    reason: str
    name: str = ""
    missing: bool = False


def recognise(users: Users, token: str, now: float) -> User | UnknownUser:
    """The user of a token, or the reason why it is not valid."""
    if user_tokens.is_signed(token):
        return _by_signature(users, token, now)
    user = _by_hash(users.listed, token)
    if user is None:
        return UnknownUser("unknown token; ask the operator for one")
    if user.token_id in users.revoked_tokens:
        return _revoked_token(user.name, users.revoked_tokens[user.token_id])
    return user


def _by_hash(listed: tuple[User, ...], token: str) -> User | None:
    """Find a user by the token's hash; compares with every user in constant time, against timing attacks."""
    digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
    match: User | None = None
    for user in listed:
        if hmac.compare_digest(user.token_sha256, digest):
            match = user
    return match


def _by_signature(users: Users, token: str, now: float) -> User | UnknownUser:
    if users.key is None:
        return UnknownUser("unknown token; this mesh has no key for tokens that expire")
    try:
        claims = user_tokens.read(users.key, token, now)
    except TokenRefused as error:
        return UnknownUser(str(error))
    name = claims.subject
    if claims.id in users.revoked_tokens:
        return _revoked_token(name, users.revoked_tokens[claims.id])
    revocation = users.revoked_users.get(name)
    if revocation is not None and claims.issued_at <= revocation.at:
        return _revoked_token(name, revocation)
    record = users.records.get(name)
    if record is None:
        return UnknownUser(f"there is no user {name} any more", name, missing=True)
    return User(
        name=name,
        role=record.role,
        token_id=claims.id,
        issued_at=claims.issued_at,
        expires_at=claims.expires_at,
    )


def _revoked_token(name: str, revocation: Revocation) -> UnknownUser:
    reason = f" ({revocation.reason})" if revocation.reason else ""
    return UnknownUser(
        f"this token of {name} was revoked by {revocation.by}{reason}; ask for a new one", name
    )
