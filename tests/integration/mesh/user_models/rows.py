"""A small classifier of rows of numbers, and the rows, as a user would bring them."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Slow(nn.Module):
    """Passes on what it gets, after a while."""

    def __init__(self, pad_ms: float) -> None:
        super().__init__()
        self.pad_s = pad_ms / 1e3

    def forward(self, rows: Tensor) -> Tensor:
        time.sleep(self.pad_s)
        return rows


def classifier(pad_ms: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), Slow(pad_ms), nn.Linear(16, 3))


class ByProcess(Dataset[dict[str, Any]]):
    """Not the same rows in each process."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": torch.full((4,), float(os.getpid())), "label": index % 3}


class Rows(Dataset[dict[str, Any]]):
    """Rows with noise that is drawn when they are read; one of them is damaged."""

    def __init__(self, size: int, damaged: int = -1) -> None:
        self.size, self.damaged = size, damaged

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.damaged:
            raise EOFError("the row is cut off")
        clean = torch.tensor([index % 7, index % 5, index % 3, 1.0])
        return {"row": clean + 0.1 * torch.randn(4), "label": index % 3}
