"""Packed sums lose nothing, take the bytes that they need, and are the same with and without a compiler."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from workers.fixed_point.kernel import FixedPointKernel, build, kernel
from workers.fixed_point.packing import CHUNK, add_packed, pack, packed_bytes, widths_of

SEED = 20_261_127
COUNTS = (0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7)


def numbers(bits: int, count: int) -> Tensor:
    """Signed numbers below 2^bits, with both ends among them."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator) >> (62 - bits)
    drawn[:1], drawn[1:2] = -(2**bits), 2**bits - 1
    return drawn


def packed(sums: Tensor, by: FixedPointKernel | None) -> tuple[Tensor, Tensor]:
    widths = widths_of(sums, by)
    written = torch.empty(packed_bytes(sums.numel(), widths), dtype=torch.uint8)
    pack(sums, widths, written, by)
    return widths, written


@pytest.mark.parametrize(
    ("bits", "width"), [(3, 4), (31, 4), (32, 5), (39, 5), (40, 6), (47, 6), (48, 8), (62, 8)]
)
def test_what_is_packed_is_added_again(bits: int, width: int) -> None:
    build()
    for count in COUNTS:
        sums = numbers(bits, count)
        before = numbers(50, count)
        found = []
        for by in {kernel(), None}:
            widths, written = packed(sums, by)
            total = before.clone()
            add_packed(total, widths, written, by)
            assert torch.equal(total, before + sums)
            found.append((widths.tolist(), written.tolist()))
        assert all(each == found[0] for each in found), "with and without the kernel"
        if count > 1:
            assert found[0][0][0] == width


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_kernel_is_among_what_is_compared() -> None:
    assert build() == ""
    assert kernel() is not None


@pytest.mark.parametrize("widths", [[7], [4, 4], []])
def test_widths_that_can_not_be_are_refused(widths: list[int]) -> None:
    with pytest.raises(ValueError, match="no widths of 9 packed sums"):
        packed_bytes(9, torch.tensor(widths, dtype=torch.uint8))
