"""Rows that came from the stage before and wait to be computed, by session."""

from __future__ import annotations

import torch

from workers.serving.retained_rows import Boundary


class ReceivedRows:
    """Rows between those that were computed and those that are still to come.

    A wave's rows are kept as views as long as all of them wait: they are computed soon, or dropped.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, Boundary]]] = {}

    def append(self, session: int, first: int, rows: Boundary) -> None:
        """Keeps rows of a session from `first` on, behind those that are there."""
        self._parts.setdefault(session, []).append((first, rows))

    def replace(self, session: int, rows: Boundary) -> None:
        """Keeps a whole history instead of what was there."""
        self._parts[session] = [(0, rows)]

    def whole(self, session: int) -> Boundary:
        """The whole history that `replace` kept; it is not kept any more."""
        ((_, rows),) = self._parts.pop(session)
        return rows

    def take(self, session: int, first: int, end: int) -> Boundary:
        """Rows `first` … `end - 1`; they, and all before them, are not kept any more.

        Raises:
            KeyError: Some of them are not there.
        """
        found: list[Boundary] = []
        left: list[tuple[int, Boundary]] = []
        at = first
        for begin, rows in self._parts.get(session, []):
            behind = begin + int(rows[0].shape[0])
            if begin <= at < behind and at < end:
                until = min(end, behind)
                found.append(tuple(tensor[at - begin : until - begin] for tensor in rows))
                at = until
            if behind > end:
                cut = max(end - begin, 0)
                left.append((begin + cut, tuple(tensor[cut:] for tensor in rows)))
        if at != end:
            raise KeyError(f"rows {at} to {end} of session {session} are not here")
        self._parts[session] = left
        return found[0] if len(found) == 1 else tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def truncate(self, session: int, rows: int) -> None:
        """Forgets all rows from position `rows` on."""
        kept = []
        for begin, part in self._parts.get(session, []):
            if begin < rows:
                kept.append((begin, tuple(tensor[: rows - begin] for tensor in part)))
        self._parts[session] = kept

    def drop(self, session: int) -> None:
        """Forgets a session. Idempotent."""
        self._parts.pop(session, None)
