"""Who asks: from a token to a user (draft §3 AAM)."""

from __future__ import annotations

import hashlib

import pytest

from entities.authorizer.access.authentication import (
    UnknownUser,
    User,
    Users,
    parse_users,
    recognise,
)
from schemas.errors import BadInput
from schemas.signals import Role


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def test_an_unknown_token_is_nobody() -> None:
    users = (User(name="ann", role=Role.ADMIN, token_sha256=digest("right")),)
    assert recognise(Users(listed=users), "right", 0.0) is users[0]
    for known, token in ((users, "wrong"), (users, ""), ((), "right")):
        assert isinstance(recognise(Users(listed=known), token, 0.0), UnknownUser)
    stranger = recognise(Users(listed=users), "wrong", 0.0)
    assert stranger == UnknownUser("unknown token; ask the operator for one")


def test_a_file_as_it_should_be() -> None:
    text = f"users:\n  - name: ann\n    role: operator\n    token_sha256: {digest('a')}\n"
    assert parse_users(text, "tokens.yaml") == (
        User(name="ann", role=Role.OPERATOR, token_sha256=digest("a"), token_id=digest("a")[:32]),
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
