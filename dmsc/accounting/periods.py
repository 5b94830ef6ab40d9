"""The period and the key of a statement, as people write them. Pure."""

from __future__ import annotations

from typing import get_args

from dmsc.run_history.selection import since_when
from schemas.accounts import AccountKey
from schemas.errors import BadInput

KEYS: tuple[AccountKey, ...] = get_args(AccountKey)


def account_key(text: str) -> AccountKey:
    """What the lines are about. Raises `BadInput` for a text that is none."""
    for key in KEYS:
        if key == text:
            return key
    raise BadInput(f"--by {text}: one of {', '.join(KEYS)}")


def period(since: str, until: str | None, now: float) -> tuple[float, float]:
    """Begin and end in seconds since the epoch. Raises `BadInput` if the end is not later."""
    begin = since_when(since, now)
    end = now if until is None else since_when(until, now)
    assert begin is not None
    assert end is not None
    if end <= begin:
        raise BadInput(f"--until {until}: it is not later than --since {since}")
    if begin < 0:
        raise BadInput(f"--since {since}: it is before 1970")
    return begin, end
