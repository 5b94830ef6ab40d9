"""What was made of each instance last: made again only once what it is made of has changed. Pure.

Of thousands of instances one has changed since a router looked at them last. The others' entries are the same
objects as then: neither put into words nor checked again, and alike at first sight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

MadeT = TypeVar("MadeT")


class Memo(Generic[MadeT]):
    """By SID, what `make(sid, *basis)` gave; one per instance, until it is forgotten."""

    def __init__(self, make: Callable[..., MadeT]) -> None:
        self._make = make
        self._made: dict[str, tuple[tuple[object, ...], MadeT]] = {}

    def of(self, sid: str, *basis: object) -> MadeT:
        """The same object as before where `basis` equals that of last time."""
        held = self._made.get(sid)
        if held is not None and held[0] == basis:
            return held[1]
        made = self._make(sid, *basis)
        self._made[sid] = (basis, made)
        return made

    def forget(self, sid: str) -> None:
        self._made.pop(sid, None)
