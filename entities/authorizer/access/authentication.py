"""Who asks (draft §3 AAM): from a token to a user, by the users' file or by this mesh's signature.

The file is the simple way; its tokens do not expire:

    users:
      - name: alice
        role: researcher
        token_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

Only hashes are kept, so that a copied file opens nothing. `printf %s TOKEN | sha256sum` makes one.
What a user may do is in `access_policy.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
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
    """A user, as one of their tokens tells. Those of the file have tokens that do not expire."""

    name: str
    role: Role
    token_sha256: str = ""
    token_id: str = ""
    issued_at: float = 0.0
    expires_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Users:
    """All that is known of users at a moment. Revocations by token id, and by user name."""

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
    if (why := names.taken(name)) is not None:
        raise BadInput(f"{place}.name: {name!r}: {why}; choose another")
    if role not in {known.value for known in Role}:
        raise BadInput(f"{place}.role: {role!r} is not one of {', '.join(known.value for known in Role)}")
    if not isinstance(token_sha256, str) or not _HASH.match(token_sha256):
        raise BadInput(f"{place}.token_sha256: must be 64 hexadecimal digits in lower case")
    return User(name=name, role=Role(role), token_sha256=token_sha256, token_id=token_sha256[:32])


@dataclass(frozen=True, slots=True)
class UnknownUser:
    """A token that is nobody's, or nobody's any more. `name`: whom a genuine token names.

    `missing`: it is genuine, and its user is not known here: gone, or so new that we have not heard of them.
    """

    reason: str
    name: str = ""
    missing: bool = False


def identify(users: Users | tuple[User, ...], token: str, now: float | None = None) -> User | None:
    """Whose token it is; None where it is nobody's, has expired or was revoked.

    `now`: seconds since the epoch; default: this moment.
    """
    found = recognise(users, token, now or time.time())
    return found if isinstance(found, User) else None


def recognise(users: Users | tuple[User, ...], token: str, now: float) -> User | UnknownUser:
    """The same, with the reason."""
    if not isinstance(users, Users):
        users = Users(listed=users)
    if user_tokens.looks_like_one(token):
        return _by_signature(users, token, now)
    found = _by_hash(users.listed, token)
    if found is None:
        return UnknownUser("unknown token; ask the operator for one")
    if found.token_id in users.revoked_tokens:
        return _revoked(found.name, users.revoked_tokens[found.token_id])
    return found


def _by_hash(listed: tuple[User, ...], token: str) -> User | None:
    """Compares with every user in constant time, so that time tells nothing."""
    digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
    found: User | None = None
    for user in listed:
        if hmac.compare_digest(user.token_sha256, digest):
            found = user
    return found


def _by_signature(users: Users, token: str, now: float) -> User | UnknownUser:
    if users.key is None:
        return UnknownUser("unknown token; this mesh has no key for tokens that expire")
    try:
        claims = user_tokens.read(users.key, token, now)
    except TokenRefused as error:
        return UnknownUser(str(error))
    name = claims.subject
    if claims.id in users.revoked_tokens:
        return _revoked(name, users.revoked_tokens[claims.id])
    of_user = users.revoked_users.get(name)
    if of_user is not None and claims.issued_at <= of_user.at:
        return _revoked(name, of_user)
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


def _revoked(name: str, revocation: Revocation) -> UnknownUser:
    why = f" ({revocation.reason})" if revocation.reason else ""
    return UnknownUser(f"this token of {name} was revoked by {revocation.by}{why}; ask for a new one", name)
