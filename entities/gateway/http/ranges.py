"""The Range header of one file (RFC 9110 §14). Pure."""

from __future__ import annotations

import re

from entities.gateway.http.problems import NotSatisfiable

_ONE = re.compile(r"^bytes=(\d*)-(\d*)$")


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(start, length) of the one range asked for; None means the whole file.

    Several ranges or other units may be ignored, says the RFC, and are. A range that begins behind the
    end raises `NotSatisfiable`.
    """
    found = _ONE.match(header.replace(" ", "")) if header else None
    if found is None or found.group(0) == "bytes=-":
        return None
    first, last = found.groups()
    if not first:
        length = min(int(last), size)
        start = size - length
    else:
        start = int(first)
        if last and int(last) < start:
            return None
        end = min(int(last) + 1, size) if last else size
        length = end - start
    if length <= 0 or start >= size:
        raise NotSatisfiable(f"Range {header}: the file has {size} bytes", size=size)
    return start, length
