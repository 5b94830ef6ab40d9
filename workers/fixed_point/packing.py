"""Exact sums in as few bytes as they need, for the way to another member: nothing is lost.

Sums are int64 with 44 bits behind the point, and gradients are small: in most chunks the upper bytes repeat
the sign. Each chunk of `CHUNK` numbers travels in 4, 5, 6 or 8 bytes a number: first the lower four bytes of
all, then the others of all. Bytes are in the order of little-endian machines, as tensors on links are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from workers.fixed_point.kernel import FixedPointKernel

CHUNK = 1 << 16
"""Numbers in a chunk, whose bytes a number depend on the largest of them."""
_UPPER = {5: torch.int8, 6: torch.int16, 8: torch.int32}
"""Bytes a number → the type of what is above the lower four."""


def chunks(count: int) -> Iterator[slice]:
    """The chunks of `count` numbers; the last one may be shorter."""
    for begin in range(0, count, CHUNK):
        yield slice(begin, min(begin + CHUNK, count))


def packed_bytes(count: int, widths: Tensor) -> int:
    """The size of `count` packed numbers. `widths`: (chunks,) uint8, the bytes a number of each chunk.

    Raises:
        ValueError: These are no widths of so many numbers.
    """
    each = widths.tolist()
    sizes = [part.stop - part.start for part in chunks(count)]
    if len(each) != len(sizes) or not {4, *_UPPER}.issuperset(each):
        raise ValueError(f"{each[:8]} are no widths of {count:,} packed sums")
    return sum(size * width for size, width in zip(sizes, each, strict=True))


def widths_of(sums: Tensor, kernel: FixedPointKernel | None) -> Tensor:
    """The bytes a number that each chunk of (n,) int64 needs: (chunks,) uint8."""
    needed = _bytes_needed if kernel is None else kernel.bytes_needed
    return torch.tensor([needed(sums[part]) for part in chunks(sums.numel())], dtype=torch.uint8)


def pack(sums: Tensor, widths: Tensor, packed: Tensor, kernel: FixedPointKernel | None) -> None:
    """Writes (n,) int64 into `packed`, (`packed_bytes`,) uint8."""
    write = _pack if kernel is None else kernel.pack
    for part, own, width in _pairs(sums, widths, packed):
        write(part, width, own)


def add_packed(sums: Tensor, widths: Tensor, packed: Tensor, kernel: FixedPointKernel | None) -> None:
    """Adds to (n,) int64 what `pack` wrote for as many numbers."""
    add = _add_packed if kernel is None else kernel.add_packed
    for part, own, width in _pairs(sums, widths, packed):
        add(part, width, own)


def _pairs(sums: Tensor, widths: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    begin = 0
    for part, width in zip(chunks(sums.numel()), widths.tolist(), strict=True):
        end = begin + (part.stop - part.start) * width
        yield sums[part], packed[begin:end], width
        begin = end


def _bytes_needed(sums: Tensor) -> int:
    low, high = (int(each) for each in torch.aminmax(sums))
    most = max(high, -1 - low)
    return next(width for width in (4, 5, 6, 8) if most < 1 << (8 * width - 1))


def _pack(sums: Tensor, width: int, packed: Tensor) -> None:
    packed[: 4 * sums.numel()].view(torch.int32).copy_(sums)  # a conversion keeps the lower bits
    if width > 4:
        packed[4 * sums.numel() :].view(_UPPER[width]).copy_(sums >> 32)


def _add_packed(sums: Tensor, width: int, packed: Tensor) -> None:
    lower = packed[: 4 * sums.numel()].view(torch.int32).to(torch.int64)
    if width == 4:
        sums += lower
    else:
        upper = packed[4 * sums.numel() :].view(_UPPER[width]).to(torch.int64)
        sums += (upper << 32) + lower.bitwise_and_(0xFFFFFFFF)
