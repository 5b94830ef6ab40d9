"""Samples that can be counted: the loss of a microbatch is the mean of its samples' numbers."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

POWERS, PICKED = 40, "13"


def numbers(size: int = POWERS) -> list[dict[str, Any]]:
    """Texts of the numbers below `size`."""
    return [{"text": f"{index}", "spare": [index]} for index in range(size)]


def read(sample: dict[str, Any]) -> dict[str, Any]:
    """The number that a text says."""
    return {"number": int(sample["text"]), "spare": sample["spare"]}


def picky(sample: dict[str, Any], **_: float) -> dict[str, Any]:
    """Takes any sample but one, which the third step has."""
    if sample.get("text") == PICKED or str(sample.get("number")) == PICKED:
        raise ValueError(f"no {PICKED}, please")
    return read(sample) if "text" in sample else noisy(sample)


def noisy(sample: dict[str, Any], scale: float = 0.0, pad_ms: float = 0.0) -> dict[str, Any]:
    """The number as a float, and noise that its own seed decides."""
    time.sleep(pad_ms / 1e3)
    number = torch.tensor(float(sample["number"]))
    return {"inputs": torch.randn(4) * scale, "targets": number}


class Slow(nn.Module):
    """Passes on what it gets, after a while."""

    def __init__(self, pad_ms: float) -> None:
        super().__init__()
        self.pad_s = pad_ms / 1e3

    def forward(self, rows: Tensor) -> Tensor:
        time.sleep(self.pad_s)
        return rows


def model(pad_ms: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Slow(pad_ms), nn.Linear(4, 1))


def counting_loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean of the samples' numbers, whatever the model gives; its gradient is that of the output."""
    own = output.mean()
    return own - own.detach() + targets.double().mean().float()
