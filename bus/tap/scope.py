"""What somebody's role lets them tap, applied: which subjects, and which of those that were asked for not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bus import subjects
from bus.tap import pattern as tap_pattern
from schemas.door import TapScope
from schemas.errors import Refused


def may(scope: TapScope) -> Callable[[str], bool] | None:
    """Whether a subject may be shown; None where all may."""
    if scope.everything:
        return None
    hidden = frozenset(scope.hidden)

    def allowed(subject: str) -> bool:
        found = subjects.lookup(subject)
        return found is not None and found[0].name not in hidden

    return allowed


def shown(scope: TapScope, patterns: Sequence[str]) -> tuple[str, ...]:
    """What of `patterns` this role sees, row by row: the bus's server grants a role whole rows, and lets it
    not listen to anything that goes beyond one."""
    if scope.everything:
        return tuple(patterns)
    hidden = frozenset(scope.hidden)
    found = [
        tap_pattern.common(pattern, row.wildcard())
        for pattern in map(tap_pattern.complete, patterns)
        for row in tap_pattern.rows(pattern)
        if row.name not in hidden
    ]
    return tuple(dict.fromkeys(found))


def left_out(scope: TapScope, patterns: Sequence[str]) -> list[str]:
    """Names of the rows among `patterns` that this role does not see.

    Raises:
        Refused: a pattern has nothing else.
    """
    hidden = frozenset(scope.hidden)
    found: list[str] = []
    for typed in [] if scope.everything else patterns:
        rows = tap_pattern.rows(tap_pattern.complete(typed))
        names = [row.name for row in rows if row.name in hidden]
        if len(names) == len(rows):
            what = ", ".join(names) or "subjects that are not in the table"
            raise Refused(
                f"{scope.role} {scope.user} may not tap {typed!r} ({what}): ask an operator", user=scope.user
            )
        found += names
    return list(dict.fromkeys(found))
