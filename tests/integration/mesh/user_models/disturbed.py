"""A model that can be disturbed while it trains, by files in a folder: for what watches a run to notice."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor, nn

VOCABULARY, WIDTH = 256, 16
LOUD = 100.0
SLOW_S = 0.25


def disturbed(folder: str) -> nn.Sequential:
    """`loud` in the folder: logits, so loss and gradients, are far larger. `slow-PID`: a process is slow."""
    return nn.Sequential(
        Slow(nn.Embedding(VOCABULARY, WIDTH), folder),
        Slow(nn.Linear(WIDTH, WIDTH), folder),
        Loud(Slow(nn.Linear(WIDTH, VOCABULARY), folder), folder),
    )


class Slow(nn.Module):
    def __init__(self, layer: nn.Module, folder: str) -> None:
        super().__init__()
        self.layer, self.folder = layer, Path(folder)

    def forward(self, inputs: Tensor) -> Tensor:
        if (self.folder / f"slow-{os.getpid()}").exists():
            time.sleep(SLOW_S)
        outputs: Tensor = self.layer(inputs)
        return outputs


class Loud(nn.Module):
    def __init__(self, layer: nn.Module, folder: str) -> None:
        super().__init__()
        self.layer, self.file = layer, Path(folder) / "loud"

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return outputs * LOUD if self.training and self.file.exists() else outputs
