"""Fewer patterns allow exactly what the many did, of all that is known to be said."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from bus.patterns import Fewer, covers, fewer

TOKENS = ("a", "b", "c")


def subjects_within(known: list[str], length: int = 4) -> list[str]:
    """All concrete subjects of up to `length` tokens that are known."""
    every = (
        ".".join(("x", *tokens))
        for count in range(1, length)
        for tokens in itertools.product((*TOKENS, "other"), repeat=count)
    )
    return [subject for subject in every if any(covers(pattern, subject) for pattern in known)]


def allows(patterns: Fewer, subject: str) -> bool:
    return any(covers(one, subject) for one in patterns.allow) and not any(
        covers(one, subject) for one in patterns.deny
    )


def hears(patterns: Fewer, subject: str) -> bool:
    """As a server has it: whoever may listen to `a.*` may listen to `a.>`."""
    widest = [one[:-1] + ">" if one.endswith("*") else one for one in patterns.allow]
    return allows(Fewer(tuple(widest), patterns.deny), subject)


PATTERNS = st.lists(st.lists(st.sampled_from((*TOKENS, "*")), min_size=1, max_size=3), max_size=12).map(
    lambda several: [".".join(("x", *tokens)) for tokens in several]
)


@settings(max_examples=50, deadline=None)
@given(patterns=PATTERNS, more=PATTERNS)
def test_the_same_is_allowed_of_what_is_known(patterns: list[str], more: list[str]) -> None:
    known = patterns + more
    found = fewer(patterns, tuple(known), ("x",))
    assert len(found.allow) + len(found.deny) <= len(set(patterns))
    for subject in subjects_within(known):
        assert allows(found, subject) is any(covers(one, subject) for one in patterns), subject
        assert hears(Fewer(tuple(patterns)), subject) or not hears(found, subject), subject


def test_what_is_joined_and_what_is_excepted() -> None:
    steps = [f"x.step.{name}.me" for name in ("commit", "abort", "fence", "adopt")]
    known = tuple(f"x.step.{name}.*" for name in ("commit", "abort", "fence", "adopt", "claim"))
    assert fewer(steps, known, ("x",)) == Fewer(("x.step.*.me",), ("x.step.claim.me",))
    assert fewer(steps[:2], known, ("x",)).allow == tuple(sorted(steps[:2])), (
        "an exception each saves nothing"
    )
    assert fewer(steps, known[:4], ("x",)) == Fewer(("x.step.*.me",))


def test_an_exception_never_takes_what_was_allowed() -> None:
    known = ("x.a.*", "x.b.*", "x.c.*", "x.d.*")
    allowed = ["x.a.*", "x.b.*", "x.c.me"]  # to except x.c.* would take x.c.me
    assert fewer(allowed, known, ("x",)).deny == ()


def test_whatever_lies_elsewhere_or_goes_deeper_stays_as_it_is() -> None:
    patterns = ["$JS.API.A.x", "$JS.API.B.x", "x.a.>", "x.b.>"]
    assert fewer(patterns, tuple(patterns), ("x",)) == Fewer(tuple(sorted(patterns)))
    assert fewer(["x.a.b.1", "x.a.c.1"], ("x.>",), ("x",)).allow == ("x.a.b.1", "x.a.c.1"), (
        "all of it is known"
    )


def test_an_exception_does_not_take_what_is_allowed_at_any_depth() -> None:
    known = tuple(f"x.step.{name}.*" for name in ("commit", "abort", "fence", "adopt", "claim"))
    steps = [f"x.step.{name}.me" for name in ("commit", "abort", "fence", "adopt")]
    found = fewer([*steps, "x.>"], known, ("x",))
    assert found == Fewer(("x.>", "x.step.*.me")), "what x.> allows is excepted nowhere"


def test_what_lies_below_is_not_let_out() -> None:
    allowed = ["x.a.*", "x.b.*", "x.c.*", "x.d.*"]
    secret = fewer(allowed, (*allowed, "x.e.secret.*"), ("x",))
    assert secret == Fewer(("x.*.*",), ("x.e.secret.*",))
    assert not hears(secret, "x.e.secret.one")
    in_part = fewer([*allowed, "x.e.secret.me"], (*allowed, "x.e.secret.*"), ("x",))
    assert in_part.allow == (*allowed, "x.e.secret.me"), "an exception would take what is allowed"
