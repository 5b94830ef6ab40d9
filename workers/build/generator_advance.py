"""Moves a random generator as a random operation on the CPU would, without its result's memory.

The CPU's generator is one stream of 32-bit draws (Mersenne Twister). `uniform_` takes one draw per element,
two for float64. `normal_` of at least 16 contiguous elements takes as many, and 16 elements' more if their
number is no multiple of 16 (ATen, `DistributionTemplates.h`: `normal_fill`). Those two make nearly all of a
model's initial values; every other operation runs on a temporary tensor instead.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Draws that are made at once, a byte of memory each: they stay in the cache."""
_NORMAL_BLOCK = 16
_DRAWS = {torch.float32: 1, torch.float64: 2}
"""Draws per element, of the types that this module knows."""


def draws_of(name: str, tensor: Tensor) -> int | None:
    """The 32-bit draws that an in-place operation takes from the CPU's generator; None: not known.

    Args:
        name: `normal_` or `uniform_`; nothing is known about others.
        tensor: What it fills; only its size, strides and dtype matter.
    """
    each, count = _DRAWS.get(tensor.dtype), tensor.numel()
    if each is None or not tensor.is_contiguous() or count < _NORMAL_BLOCK:
        return None
    if name not in ("normal_", "uniform_") or not _counted_right(name, tensor.dtype):
        return None
    return _draws(name, tensor.dtype, count)


def _draws(name: str, dtype: torch.dtype, count: int) -> int:
    again = _NORMAL_BLOCK if name == "normal_" and count % _NORMAL_BLOCK else 0
    return (count + again) * _DRAWS[dtype]


def advance(draws: int, generator: torch.Generator | None = None) -> None:
    """Takes `draws` 32-bit draws from the generator (the CPU's default one), 5 ns each."""
    chunk = torch.empty(min(CHUNK, draws), dtype=torch.uint8)
    for begin in range(0, draws, CHUNK):
        chunk[: min(CHUNK, draws - begin)].random_(generator=generator)


@functools.cache
def _counted_right(name: str, dtype: torch.dtype) -> bool:
    """Whether this build of torch draws as the module's docstring says, seen at small and odd sizes."""
    sizes = (16, 17, 31, 32, 1000, 4097)
    for size in sizes:
        own, counted = (torch.Generator().manual_seed(size) for _ in range(2))
        getattr(torch.empty(size, dtype=dtype), name)(generator=own)
        advance(_draws(name, dtype, size), counted)
        if not torch.equal(own.get_state(), counted.get_state()):
            return False
    return True
