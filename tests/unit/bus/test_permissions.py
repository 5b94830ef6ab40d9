"""What the server is told of an identity's permissions is what the table gives it, said shortly.

That the table gives each the right ones is asked of the real server (`tests/integration/guard`).
"""

from __future__ import annotations

import itertools
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.identity import Identity
from bus.patterns import Fewer
from bus.permissions import KNOWN, Permissions, of_identity, of_role
from bus.subjects import SUBJECTS
from schemas.envelope import EntityKind as K
from schemas.signals import Role

LITERALS = sorted({token for row in SUBJECTS for token in row.pattern.split(".") if token.isalpha()})


def identity(kind: K, name: str, cluster: str, job: str) -> Identity:
    more = {
        K.INSTANCE: {"job": job, "cluster": cluster, "node": "n"},
        K.CLUSTER: {"cluster": cluster, "node": "n"},
        K.GATEWAY: {"cluster": cluster},
        K.ROUTER: {"cluster": cluster},
        K.FUNCTIONAL_MODULE: {"module": job},
    }
    return Identity(name=name, kind=kind, **more.get(kind, {}))


@cache
def said(tokens: tuple[str, ...]) -> list[str]:
    """All that is known to be said, with these tokens in all places."""
    found = set()
    for pattern in KNOWN:
        parts = [tokens if token in ("*", ">") else (token,) for token in pattern.split(".")]
        found |= {".".join(each) for each in itertools.product(*parts)}
    return sorted(found)


def differences(given: Permissions, tokens: tuple[str, ...]) -> list[str]:
    publish, subscribe = given.shortly()
    many = (Fewer(given.publish, given.never), Fewer(given.subscribe))
    return [
        subject
        for before, after in zip(many, (publish, subscribe), strict=True)
        for subject in allowed(before, tokens) ^ allowed(after, tokens)
    ]


def allowed(patterns: Fewer, tokens: tuple[str, ...]) -> set[str]:
    allow, deny = one_of(patterns.allow), one_of(patterns.deny)
    return {subject for subject in said(tokens) if allow.fullmatch(subject) and not deny.fullmatch(subject)}


def one_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    any_of = "|".join(re.escape(one).replace(r"\*", r"[^.]+").replace(">", ".+") for one in patterns)
    return re.compile(any_of or "(?!)")


@pytest.mark.parametrize("kind", K)
def test_of_every_kind_the_same_is_allowed(kind: K) -> None:
    assert not differences(of_identity(identity(kind, "me", "a", "j")), ("me", "a", "j", "other"))


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from((K.INSTANCE, K.CLUSTER, K.FUNCTIONAL_MODULE)),
    names=st.tuples(*[st.sampled_from(LITERALS)] * 3),
)
def test_whatever_they_are_called(kind: K, names: tuple[str, str, str]) -> None:
    """An instance may be called `resolve`, and its job `begin`."""
    assert not differences(of_identity(identity(kind, *names)), (*dict.fromkeys(names), "other"))


@pytest.mark.parametrize("role", Role)
def test_of_every_role_the_same_is_allowed(role: Role) -> None:
    assert not differences(of_role(role, "_INBOX.u"), ("me", "other"))


def test_a_users_module_keeps_what_it_may_as_a_module() -> None:
    module = of_identity(identity(K.FUNCTIONAL_MODULE, "mine", "", "mine"))
    assert not differences(of_role(Role.RESEARCHER, "_INBOX.u").with_(module), ("mine", "other"))


def test_what_an_instance_may_is_said_in_few_patterns() -> None:
    """Each one costs at every connection."""
    given = of_identity(identity(K.INSTANCE, "j-s0-r0", "a", "j"))
    publish, subscribe = given.shortly()
    shortly = len(publish.allow + publish.deny + subscribe.allow + subscribe.deny)
    assert shortly < 0.75 * len(given.publish + given.subscribe)
