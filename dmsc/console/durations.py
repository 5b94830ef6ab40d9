"""Durations as people write and read them at the command line."""

from __future__ import annotations

import re

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_LONGEST_DAYS = 36_500
_FORM = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) *(s|m|min|h|d)", re.ASCII)


def parse_duration(text: str, option: str, *, zero: bool = False) -> float:
    """Return the seconds that a duration such as `90s`, `30m`, `30min`, `8h`, `14d` or `1.5 h` stands for.

    The result is above 0 (with `zero`: 0 or above) and at most 100 years.

    Raises:
        BadInput: The text is no such duration. The message names `option`.
    """
    from schemas.errors import BadInput  # imported here so that commands start without the schemas

    match = _FORM.fullmatch(text.strip())
    seconds = -1.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if not 0 <= seconds <= _LONGEST_DAYS * _UNITS["d"] or (seconds == 0 and not zero):
        raise BadInput(f"{option} {text}: write it as 90s, 30m, 8h or 14d, of {_LONGEST_DAYS}d at most")
    return seconds


def in_units(seconds: float) -> str:
    """The duration in the unit that suits it, to three figures: `0.36 s`, `12.4 min`, `146 h`."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{seconds / 60:.3g} min"
    hours = seconds / 3600.0
    return f"{hours:.3g} h" if hours < 1000 else f"{hours:,.0f} h"
