"""Applies a user's tap scope: which subjects the role may tap, and which of the requested rows it may not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bus import subjects
from bus.tap import pattern as tap_pattern
from schemas.errors import Refused
from schemas.gateway_api import TapScope


def may(scope: TapScope) -> Callable[[str], bool] | None:
    """A function that says whether a subject may be shown; None if all may."""
    if scope.everything:
        return None
    hidden = frozenset(scope.hidden)

    def allowed(subject: str) -> bool:
        match = subjects.lookup(subject)
        return match is not None and match[0].name not in hidden

    return allowed


def shown(scope: TapScope, patterns: Sequence[str]) -> tuple[str, ...]:
    """The parts of `patterns` that this role sees, row by row.

    The server grants a role whole rows, and refuses a subscription that goes beyond one row.
    """
    if scope.everything:
        return tuple(patterns)
    hidden = frozenset(scope.hidden)
    visible = [
        tap_pattern.common(pattern, row.wildcard())
        for pattern in map(tap_pattern.complete, patterns)
        for row in tap_pattern.rows(pattern)
        if row.name not in hidden
    ]
    return tuple(dict.fromkeys(visible))


def left_out(scope: TapScope, patterns: Sequence[str]) -> list[str]:
    """The names of the rows in `patterns` that this role does not see.

    Raises:
        Refused: the role sees no row of a pattern.
    """
    hidden = frozenset(scope.hidden)
    hidden_names: list[str] = []
    for typed in [] if scope.everything else patterns:
        rows = tap_pattern.rows(tap_pattern.complete(typed))
        names = [row.name for row in rows if row.name in hidden]
        if len(names) == len(rows):
            what = ", ".join(names) or "subjects that are not in the table"
            raise Refused(
                f"{scope.role} {scope.user} may not tap {typed!r} ({what}): ask an operator", user=scope.user
            )
        hidden_names += names
    return list(dict.fromkeys(hidden_names))
