"""Who may do what (draft §3 AAM, §4.3 Type 3): users from a file, roles from a table, a pure decision.

The file:

    users:
      - name: alice
        role: researcher
        token_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

Only hashes are kept, so that a copied file opens nothing. `printf %s TOKEN | sha256sum` makes one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Any

import yaml

from schemas.errors import BadInput
from schemas.signals import AccessDecision, Role

_READ = frozenset({"mesh.read", "job.read", "job.list", "fault.read", "tap.read"})
_RESEARCH = _READ | {
    *("job.submit", "job.cancel.own", "dataset.read", "dataset.write"),
    *("policy.ask", "observation.write.own"),
}
_OPERATE = _RESEARCH | {
    *("job.cancel", "policy.write", "observation.write", "node.cordon", "tap.private"),
    *("chaos.strike", "dataset.delete"),
}

ROLE_ACTIONS: dict[Role, frozenset[str]] = {
    Role.VIEWER: _READ,  # looks at everything, changes nothing
    Role.RESEARCHER: _RESEARCH,  # submits, and ends what is theirs
    Role.OPERATOR: _OPERATE,  # steers the mesh: ends any job, sets policies, drains nodes
    Role.ADMIN: _OPERATE,  # all of it, and whatever else comes (see `decide`)
}

_HASH = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """One line of the file."""

    name: str
    role: Role
    token_sha256: str


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
    for field in ("name", "token_sha256"):
        values = [getattr(user, field) for user in users]
        for index, value in enumerate(values):
            if value in values[:index]:
                raise BadInput(
                    f"{where}: users[{index}].{field} is the same as in users[{values.index(value)}]"
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
    if role not in {known.value for known in Role}:
        raise BadInput(f"{place}.role: {role!r} is not one of {', '.join(known.value for known in Role)}")
    if not isinstance(token_sha256, str) or not _HASH.match(token_sha256):
        raise BadInput(f"{place}.token_sha256: must be 64 hexadecimal digits in lower case")
    return User(name=name, role=Role(role), token_sha256=token_sha256)


def identify(users: tuple[User, ...], token: str) -> User | None:
    """Whose token it is. Compares with every user in constant time, so that time tells nothing."""
    digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
    found: User | None = None
    for user in users:
        if hmac.compare_digest(user.token_sha256, digest):
            found = user
    return found


def needs_owner(user: User, action: str) -> bool:
    """Whether the answer depends on whose the resource is."""
    return action not in ROLE_ACTIONS[user.role] and f"{action}.own" in ROLE_ACTIONS[user.role]


def decide(
    user: User | None, action: str, resource: str, owner: str | None, valid_s: float
) -> AccessDecision:
    """Type 3's answer. `owner` is whose `resource` is, where `needs_owner` asked for it.

    Denials have `valid_s` 0: a user who is added takes effect at once.
    """
    if user is None:
        return AccessDecision(allow=False, reason="unknown token; ask the operator for one")
    allowed = ROLE_ACTIONS[user.role]
    about = {"user": user.name, "role": user.role}
    if user.role is Role.ADMIN or action in allowed:
        return AccessDecision(allow=True, reason=f"{user.role} may {action}", valid_s=valid_s, **about)
    if f"{action}.own" in allowed:
        if owner == user.name:
            return AccessDecision(
                allow=True, reason=f"{user.role} may {action} what is theirs", valid_s=valid_s, **about
            )
        whose = f"it is {owner}'s" if owner else "no such job"
        return AccessDecision(
            allow=False,
            reason=f"{user.role} {user.name} may {action} only what is theirs; {resource}: {whose}",
            **about,
        )
    return AccessDecision(allow=False, reason=f"{user.role} {user.name} may not {action}", **about)
