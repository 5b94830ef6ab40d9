"""One cached result per instance, built again only if its inputs have changed. Pure.

Of thousands of instances only a few have changed since a router's last look. The entries of the others stay
the same objects: they are not formatted and validated again, and comparing them by identity suffices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


class Memo(Generic[ResultT]):
    """The last result of `make(sid=sid, **basis)` for each SID, until it is forgotten."""

    def __init__(self, make: Callable[..., ResultT]) -> None:
        self._make = make
        self._results: dict[str, tuple[dict[str, object], ResultT]] = {}

    def of(self, sid: str, **basis: object) -> ResultT:
        """The result for `sid`: the same object as before if `basis` equals the last one."""
        cached = self._results.get(sid)
        if cached is not None and cached[0] == basis:
            return cached[1]
        result = self._make(sid=sid, **basis)
        self._results[sid] = (basis, result)
        return result

    def forget(self, sid: str) -> None:
        self._results.pop(sid, None)
