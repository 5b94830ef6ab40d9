"""The byte GPT on emulated devices: each block also waits, as if a device of its own computed it.

A machine with two cores can't behave like four devices: a dead worker leaves its share of the cores to the
others, and the control plane competes with the workers. With padded blocks, the time of a microbatch is
mostly waiting, so that workers are independent of each other, as on separate devices. Benchmarks and the
chaos demonstration use it and say so. It is an emulation; do not train with it.

Devices differ, and change: with `pace`, a folder, a process multiplies its waits by the number in the file
`pace/<pid>`, from the next wait on. Without such a file the factor is 1. A node agent's emulated slots
(`entities.cluster.capabilities.slots.EmulatedSlot`) divide all waits by their speed.
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

_emulated = [1.0]


def emulate(speed: float) -> None:
    """From here on, this process's padded layers take 1/`speed` of their time."""
    _emulated[0] = speed


class _Wait(torch.autograd.Function):
    """The identity, which takes `seconds` forward and twice that backward, like real layers."""

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
    """A layer with a wait of `seconds` forward and 2 × `seconds` backward; its results are the layer's.

    On an emulated slot of speed s the layer and its waits together take 1/s of their time: what the layer
    itself takes forward is measured, and taken for half of what it takes backward.
    """

    def __init__(self, layer: nn.Module, seconds: float, pace: str | None) -> None:
        super().__init__()
        self.layer = layer
        self.seconds = seconds
        self.pace = pace

    def forward(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        y, speed = self.layer(x), _emulated[0]
        own_s = time.perf_counter() - began if speed != 1.0 else 0.0
        seconds = max(0.0, (self.seconds * pace_of(self.pace) + own_s) / speed - own_s)
        padded: Tensor = _Wait.apply(y, seconds)  # type: ignore[no-untyped-call]  # torch: unannotated
        return padded


def pace_of(folder: str | None) -> float:
    """The factor on this process's waits; 1 without a file for it, or while the file is being written."""
    if folder is None:
        return 1.0
    try:
        return float((Path(folder) / str(os.getpid())).read_text())
    except (OSError, ValueError):
        return 1.0


def padded_gpt(pad_ms: float = 5.0, pace: str | None = None, **sizes: Any) -> nn.Sequential:
    """`byte_gpt(**sizes)` whose blocks wait `pad_ms` milliseconds forward and 2 × `pad_ms` backward.

    The waits are multiplied by the number in the file for the process in the folder `pace`, if there is one.

    Raises:
        ValueError: The wait is negative, or `byte_gpt` refuses a size.
    """
    if pad_ms < 0:
        raise ValueError(f"pad_ms must not be negative, not {pad_ms}")
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in byte_gpt(**sizes).named_children():
        named[name] = Padded(layer, pad_ms / 1000, pace) if name.startswith("block_") else layer
    return nn.Sequential(named)
