"""Who may do what (draft §3 AAM, §4.3 Type 3)."""

from __future__ import annotations

import hashlib
import itertools

import pytest

from entities.authorizer.access_rules import User, decide, identify, needs_owner, parse_users
from schemas.errors import BadInput
from schemas.signals import Role


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def user(role: Role, name: str = "ann") -> User:
    return User(name=name, role=role, token_sha256=digest("t"))


ALLOWED = {
    Role.VIEWER: {"mesh.read", "job.read", "job.list"},
    Role.RESEARCHER: {"mesh.read", "job.read", "job.list", "job.submit", "dataset.read", "dataset.write"},
    Role.OPERATOR: {
        "mesh.read", "job.read", "job.list", "job.submit", "job.cancel",
        "dataset.read", "dataset.write", "policy.write",
    },
}  # fmt: skip
ACTIONS = ALLOWED[Role.OPERATOR] | {"anything.else"}


@pytest.mark.parametrize(("role", "action"), list(itertools.product(Role, sorted(ACTIONS))))
def test_the_table_of_roles(role: Role, action: str) -> None:
    decision = decide(user(role), action, "x", None, 5.0)
    assert decision.allow is (role is Role.ADMIN or action in ALLOWED[role])
    assert decision.reason
    assert "\n" not in decision.reason
    assert (decision.user, decision.role) == ("ann", role)
    assert decision.valid_s == (5.0 if decision.allow else 0.0)


def test_a_researcher_ends_only_what_is_theirs() -> None:
    ann = user(Role.RESEARCHER)
    assert needs_owner(ann, "job.cancel")
    assert decide(ann, "job.cancel", "j", "ann", 5.0).allow
    theirs = decide(ann, "job.cancel", "j", "bob", 5.0)
    assert not theirs.allow
    assert theirs.reason == "researcher ann may job.cancel only what is theirs; j: it is bob's"
    assert not decide(ann, "job.cancel", "j", None, 5.0).allow
    assert not needs_owner(user(Role.OPERATOR), "job.cancel")
    assert not needs_owner(user(Role.VIEWER), "job.cancel")


def test_an_unknown_token_is_nobody() -> None:
    users = (User(name="ann", role=Role.ADMIN, token_sha256=digest("right")),)
    assert identify(users, "right") is users[0]
    assert identify(users, "wrong") is None
    assert identify(users, "") is None
    assert identify((), "right") is None
    decision = decide(None, "mesh.read", "mesh", None, 5.0)
    assert (decision.allow, decision.user, decision.valid_s) == (False, "", 0.0)


def test_a_file_as_it_should_be() -> None:
    text = f"users:\n  - name: ann\n    role: operator\n    token_sha256: {digest('a')}\n"
    assert parse_users(text, "tokens.yaml") == (
        User(name="ann", role=Role.OPERATOR, token_sha256=digest("a")),
    )
    assert parse_users("users: []", "tokens.yaml") == ()


GOOD = f"{{name: a, role: viewer, token_sha256: {digest('a')}}}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must have a key users"),
        ("[1]", "must have a key users"),
        ("users: 3", "must have a key users"),
        ("users: [3]", "users[0]: must have name, role, token_sha256"),
        ("a: [", "is not YAML"),
        ("users: [{name: a, role: viewer, token: secret}]", "users[0].token: plain tokens are refused"),
        (
            "users: [{name: a, role: king, token_sha256: x}]",
            "users[0].role: 'king' is not one of viewer, researcher",
        ),
        ("users: [{name: a, role: viewer, token_sha256: abc}]", "users[0].token_sha256: must be 64 hex"),
        ("users: [{name: a, role: viewer}]", "users[0].token_sha256: must be 64 hex"),
        ("users: [{name: 3, role: viewer}]", "users[0].name: must be a text"),
        ("users: [{name: a, roll: viewer}]", "users[0].roll: unknown key"),
        (f"users: [{GOOD}, {GOOD}]", "users[1].name is the same as in users[0]"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_place(text: str, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_users(text, "tokens.yaml")
    assert caught.value.text.startswith("tokens.yaml:")
    assert says in caught.value.text
    assert "\n" not in caught.value.text
    assert "secret" not in caught.value.text, "a token must not get into a log by way of an error"
