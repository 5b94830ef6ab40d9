"""The byte GPT on emulated devices: each block also waits, as if a device of its own computed it.

A machine with two cores can't show what four devices do: a worker that dies hands its share of the cores to
the others, and a control plane competes with what it controls. With padded blocks the time of a microbatch is
mostly waiting, so workers are independent of each other, as they are on devices of their own. Benchmarks and
the chaos demonstration use it and say so; it is an emulation, nobody should train with it.

Devices differ, and change: with `pace`, a folder, a process waits as many times longer as the number in the
file `pace/<pid>` says, from the next wait on. Without such a file it is 1.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workers.models.gpt import byte_gpt


class _Wait(torch.autograd.Function):
    """The identity that takes `seconds` in forward and twice that in backward, as real layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Padded(nn.Module):
    """A layer and a wait of `seconds` forward, 2 × `seconds` backward; its numbers are the layer's own."""

    def __init__(self, layer: nn.Module, seconds: float, pace: str | None) -> None:
        super().__init__()
        self.layer = layer
        self.seconds = seconds
        self.pace = pace

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.seconds * pace_of(self.pace)
        padded: Tensor = _Wait.apply(self.layer(x), seconds)  # type: ignore[no-untyped-call]  # torch: unannotated
        return padded


def pace_of(folder: str | None) -> float:
    """How many times longer this process waits; 1 without a file for it, or while it is being written."""
    if folder is None:
        return 1.0
    try:
        return float((Path(folder) / str(os.getpid())).read_text())
    except (OSError, ValueError):
        return 1.0


def padded_gpt(pad_ms: float = 5.0, pace: str | None = None, **sizes: Any) -> nn.Sequential:
    """`byte_gpt(**sizes)` whose blocks wait `pad_ms` milliseconds forward and 2 × `pad_ms` backward, and
    `pace` times as long where that folder has a file for the process.

    Raises:
        ValueError: a negative wait, or a size that `byte_gpt` refuses.
    """
    if pad_ms < 0:
        raise ValueError(f"pad_ms must not be negative, not {pad_ms}")
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in byte_gpt(**sizes).named_children():
        named[name] = Padded(layer, pad_ms / 1000, pace) if name.startswith("block_") else layer
    return nn.Sequential(named)
