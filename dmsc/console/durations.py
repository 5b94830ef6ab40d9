"""Durations as people write them at the command line."""

from __future__ import annotations

import re

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_LONGEST_DAYS = 36_500
_FORM = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) *(s|m|min|h|d)", re.ASCII)


def parse_duration(text: str, option: str, *, zero: bool = False) -> float:
    """Seconds, above 0 (`zero`: or 0) and up to 100 years, of `90s`, `30m` or `30min`, `8h`, `14d`, `1.5 h`.

    Raises:
        BadInput: it is none; names `option`.
    """
    from schemas.errors import BadInput  # here: commands start without the schemas

    found = _FORM.fullmatch(text.strip())
    seconds = -1.0 if found is None else float(found[1]) * _UNITS[found[2]]
    if not 0 <= seconds <= _LONGEST_DAYS * _UNITS["d"] or (seconds == 0 and not zero):
        raise BadInput(f"{option} {text}: write it as 90s, 30m, 8h or 14d, of {_LONGEST_DAYS}d at most")
    return seconds
