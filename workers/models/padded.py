"""The byte GPT on emulated devices: each block also waits, as if a device of its own computed it.

A machine with two cores can't behave like four devices: a dead worker leaves its share of the cores to the
others, and the control plane competes with the workers. With padded blocks, the time of a microbatch is
mostly waiting, so that workers are independent of each other, as on separate devices. Benchmarks and the
chaos demonstration use it and say so. It is an emulation; do not train with it.

Devices differ, and change: that belongs to the slot, not to the process. A node agent's emulated slots
(`entities.cluster.core.EmulatedSlot`) divide all waits by their speed, which a script of the agent's may
change while jobs run (`schemas.slot_conditions`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from workers.devices.emulated_slot import EmulatedSlotConditions
from workers.models.gpt import byte_gpt

_slot = [EmulatedSlotConditions()]


def emulate(slot: EmulatedSlotConditions) -> None:
    """From here on, this process's padded layers take as long as on the device that the slot stands for."""
    _slot[0] = slot


class _Wait(torch.autograd.Function):
    """The identity, which takes its time forward and twice that backward, like real layers.

    `seconds` are those of a slot of speed 1, `own_s` is what the layer itself took of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, own_s: float) -> Tensor:
        ctx.seconds, ctx.own_s = seconds, own_s
        time.sleep(_wait_s(seconds, own_s))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(2 * _wait_s(ctx.seconds, ctx.own_s))
        return gradients[0], None, None


def _wait_s(seconds: float, own_s: float) -> float:
    """By the slot's speed at this moment."""
    speed = _slot[0].speed_now()
    return seconds if speed == 1.0 else max(0.0, (seconds + own_s) / speed - own_s)


class Padded(nn.Module):
    """A layer with a wait of `seconds` forward and 2 × `seconds` backward; its results are the layer's.

    On an emulated slot of speed s the layer and its waits together take 1/s of their time: what the layer
    itself takes forward is measured, and taken for half of what it takes backward.
    """

    def __init__(self, layer: nn.Module, seconds: float) -> None:
        super().__init__()
        self.layer = layer
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        y = self.layer(x)
        own_s = time.perf_counter() - began
        padded: Tensor = _Wait.apply(y, self.seconds, own_s)  # type: ignore[no-untyped-call]  # torch: unannotated
        return padded


def padded_gpt(pad_ms: float = 5.0, **sizes: Any) -> nn.Sequential:
    """`byte_gpt(**sizes)` whose blocks wait `pad_ms` milliseconds forward and 2 × `pad_ms` backward.

    Raises:
        ValueError: The wait is negative, or `byte_gpt` refuses a size.
    """
    if pad_ms < 0:
        raise ValueError(f"pad_ms must not be negative, not {pad_ms}")
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in byte_gpt(**sizes).named_children():
        named[name] = Padded(layer, pad_ms / 1000) if name.startswith("block_") else layer
    return nn.Sequential(named)
