"""Rows that a stage sent downstream and keeps, so that a neighbour's successor can compute what was lost.

They are a copy, and count in the budget that admission sees: per token the width of one boundary, where the
neighbour's keys and values have twice that per layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Boundary = tuple[Tensor, ...]
"""What crosses a cut for some rows: tensors (rows, …), equally long; see `StageModel`."""


class RetainedRows:
    """Boundary rows by session, from position 0 on."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Boundary]] = {}
        self._lengths: dict[str, int] = {}
        self._bytes: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes of all rows that are kept."""
        return sum(self._bytes.values())

    def rows(self, session: str) -> int:
        """How many rows of a session are kept."""
        return self._lengths.get(session, 0)

    def keep(self, session: str, position: int, boundary: Boundary) -> None:
        """Keeps rows that were sent; those that were kept from `position` on are replaced.

        Raises:
            ValueError: Rows before `position` are missing.
        """
        if position > self.rows(session):
            raise ValueError(f"rows {self.rows(session)} to {position} of session {session} were never kept")
        if position < self.rows(session):
            self.truncate(session, position)
        # a view would keep the whole wave's tensor alive
        own = tuple(tensor.clone() for tensor in boundary)
        self._parts.setdefault(session, []).append(own)
        self._lengths[session] = position + own[0].shape[0]
        self._bytes[session] = self._bytes.get(session, 0) + _bytes(own)

    def between(self, session: str, first: int, end: int) -> Boundary:
        """Rows `first` … `end - 1`.

        Raises:
            KeyError: Some of them are not kept.
        """
        if not 0 <= first < end <= self.rows(session):
            raise KeyError(f"rows {first} to {end} of session {session}: {self.rows(session)} are kept")
        parts = self._parts[session]
        if len(parts) > 1:
            parts[:] = [_joined(parts)]
        return tuple(tensor[first:end] for tensor in parts[0])

    def truncate(self, session: str, rows: int) -> None:
        """Forgets all rows from position `rows` on."""
        if rows <= 0:
            self.drop(session)
        elif rows < self.rows(session):
            kept = tuple(tensor.clone() for tensor in self.between(session, 0, rows))
            self._parts[session] = [kept]
            self._lengths[session], self._bytes[session] = rows, _bytes(kept)

    def drop(self, session: str) -> None:
        """Forgets a session. Idempotent."""
        for table in (self._parts, self._lengths, self._bytes):
            table.pop(session, None)


def _joined(parts: Sequence[Boundary]) -> Boundary:
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def _bytes(boundary: Boundary) -> int:
    return sum(tensor.nbytes for tensor in boundary)
