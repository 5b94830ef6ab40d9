"""Rows of several sessions as one hop: a table that says whose they are, and the rows behind one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from schemas.errors import BadInput
from workers.serving.retained_rows import Boundary
from workers.serving.runtime.session_table import SentRows

_COLUMNS = 5


def pack_wave(items: Sequence[SentRows], boundaries: Sequence[Boundary]) -> list[Tensor]:
    """Tensors of a hop.

    Args:
        items: What is sent, one line each.
        boundaries: The tensors of each, (rows, …); a single one may have any shapes.

    Returns:
        The table (items, 5) int64 (session, fence, attempt, first row, rows), and each boundary tensor of all
        items together (all rows, …).
    """
    table = [[item.session, item.fence, item.attempt, item.first, item.rows] for item in items]
    if len(boundaries) == 1:
        together = [tensor.contiguous() for tensor in boundaries[0]]
    else:
        together = [torch.cat(tensors) for tensors in zip(*boundaries, strict=True)]
    return [torch.tensor(table, dtype=torch.int64), *together]


def unpack_wave(tensors: Sequence[Tensor]) -> list[tuple[SentRows, Boundary]]:
    """What `pack_wave` packed; the boundaries are views.

    Raises:
        BadInput: The table and the tensors do not fit together.
    """
    table = tensors[0] if tensors else torch.empty(0)
    if (
        table.dtype is not torch.int64
        or table.dim() != 2
        or table.shape[1] != _COLUMNS
        or not len(tensors) > 1
    ):
        raise BadInput("a wave without a table of its sessions")
    items = [SentRows(*line) for line in table.tolist()]
    if any(min(item.fence, item.attempt, item.first, item.rows - 1) < 0 for item in items):
        raise BadInput("a wave with a line that can't be")
    if len(items) == 1:
        return [(items[0], tuple(tensors[1:]))]
    rows = [item.rows for item in items]
    if any(tensor.dim() == 0 or tensor.shape[0] != sum(rows) for tensor in tensors[1:]):
        raise BadInput(f"a wave of {sum(rows)} rows with tensors of other lengths")
    parts = zip(*(torch.split(tensor, rows) for tensor in tensors[1:]), strict=True)
    return list(zip(items, parts, strict=True))
