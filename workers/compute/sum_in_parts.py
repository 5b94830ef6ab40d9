"""An all-reduce of exact sums in parts: each member sums and finishes one part for all (ADR-0066).

The flat sum is cut into one part for each member: equal ones, or as a module suggested (ADR-0101). A member
sends every other one its own sum of that one's part, packed into as few bytes as it needs. It adds what it
gets to its own sum of its part, makes the means, and sends those. So each member has all means, as if it had
all-reduced and finished the whole sum: integers add to the same in any order, and each mean is rounded once,
from the same integer. On the way are 5 + 4 bytes a parameter instead of 8 + 8, and each member finishes one
part instead of all.

A part is made of whole chunks, since the checksum is. Nobody but its owner has the sum of a part. So whoever
gets means looks whether they are what the owner sent: replicas must not drift apart by a bit unnoticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from workers.fixed_point.kernel import FixedPointKernel
from workers.fixed_point.packing import CHUNK, add_packed, pack, packed_bytes, widths_of
from workers.links.reduction import GroupExchange

_WORD = 8
FinishPart = Callable[[Tensor, Tensor], list[int]]
"""Writes the means of a part (n,) int64 into (n,) float32, and returns the products of its chunks."""


class PartBuffers:
    """Memory that one reduction leaves to the next: new pages cost several times what is done in them."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, size: int) -> Tensor:
        """(size,) uint8; of each name there is one, so that the next call takes the same memory."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            kept = self._kept[name] = torch.empty(size, dtype=torch.uint8)
        return kept[:size]

    def divide(self, name: str, sizes: dict[int, int]) -> dict[int, Tensor]:
        """(size,) uint8 for each key, one behind the other, each at a whole word."""
        whole = {key: -(-size // _WORD) * _WORD for key, size in sizes.items()}
        parts = torch.split(self.take(name, sum(whole.values())), list(whole.values()))
        return {key: part[: sizes[key]] for key, part in zip(sizes, parts, strict=True)}


@dataclass(frozen=True)
class _PackedPart:
    widths: Tensor
    numbers: Tensor


def part_bounds(size: int, shares: Sequence[float]) -> list[slice]:
    """Cuts a sum of `size` numbers into whole chunks, as nearly as possible by these relative shares."""
    count, whole, upto = -(-size // CHUNK), sum(map(Fraction, shares)), Fraction(0)
    ends = [0]
    for share in shares:
        upto += Fraction(share)
        ends.append(min(int(count * upto / whole) * CHUNK, size))
    return [slice(*pair) for pair in itertools.pairwise(ends)]


class SumInParts:
    """One reduction: made and finished on the thread that owns the sum, exchanged on another one.

    After construction the sum may change: all that is sent was copied.

    Args:
        flat: (n,) int64 on the host, this member's sum.
        microbatches: What is in it.
        rank: This member's place in the group.
        shares: Of all members, in their order: how much of the sum each one sums and finishes, relatively.
        kernel: The kernel; None: torch packs.
        finish: See `FinishPart`.
        buffers: Memory; a reduction that failed must not give it to another one.
    """

    def __init__(
        self,
        flat: Tensor,
        microbatches: frozenset[int],
        *,
        rank: int,
        shares: Sequence[float],
        kernel: FixedPointKernel | None,
        finish: FinishPart,
        buffers: PartBuffers,
    ) -> None:
        self.microbatches = microbatches
        self.bytes = flat.nbytes
        self.buffers = buffers
        self._rank = rank
        self._kernel = kernel
        self._finish = finish
        self.parts = part_bounds(flat.numel(), shares)
        self._others = [place for place in range(len(shares)) if place != rank]
        own = flat[self.parts[rank]]
        self._own = buffers.take("own", own.nbytes).view(torch.int64).copy_(own)
        self._sent = self._pack(flat)
        self._results: dict[int, Tensor] = {}

    def _pack(self, flat: Tensor) -> dict[int, _PackedPart]:
        widths = {other: widths_of(flat[self.parts[other]], self._kernel) for other in self._others}
        sizes = {other: packed_bytes(self._size(other), widths[other]) for other in self._others}
        numbers = self.buffers.divide("sent", sizes)
        for other in self._others:
            pack(flat[self.parts[other]], widths[other], numbers[other], self._kernel)
        return {other: _PackedPart(widths[other], numbers[other]) for other in self._others}

    def _size(self, place: int) -> int:
        part = self.parts[place]
        return int(part.stop - part.start)

    def exchange(self, line: GroupExchange) -> None:
        """Sums and finishes this member's part, and gets those of the others. Blocks.

        Raises:
            RuntimeError: A member is gone or late; or what came is not what was sent.
        """
        own = self._size(self._rank)
        widths = {other: torch.empty(-(-own // CHUNK), dtype=torch.uint8) for other in self._others}
        line.swap({other: packed.widths for other, packed in self._sent.items()}, widths)
        try:
            sizes = {other: packed_bytes(own, widths[other]) for other in self._others}
        except ValueError as error:
            raise RuntimeError(str(error)) from None
        came = self.buffers.divide("received", sizes)
        line.swap({other: packed.numbers for other, packed in self._sent.items()}, came)
        for other in self._others:
            add_packed(self._own, widths[other], came[other], self._kernel)
        result = self._finished(self.buffers.take("sent", _result_bytes(own)))
        results = self.buffers.divide(
            "received", {each: _result_bytes(self._size(each)) for each in self._others}
        )
        line.swap(dict.fromkeys(self._others, result), results)
        for other, each in results.items():
            if int(each[:_WORD].view(torch.int64)) != _digest(each):
                raise RuntimeError(f"the means of rank {other} arrived otherwise than they were sent")
        self._results = {self._rank: result, **results}

    def _finished(self, result: Tensor) -> Tensor:
        """The part's result: a word of digest, the products of its chunks, the means."""
        result[-_WORD:] = 0
        products, means = _opened(result, self._size(self._rank))
        found = self._finish(self._own, means)
        products.copy_(torch.tensor([(each + 2**63) % 2**64 - 2**63 for each in found], dtype=torch.int64))
        result[:_WORD].view(torch.int64).fill_(_digest(result))
        return result

    @property
    def products(self) -> list[int]:
        """The products of all chunks, in their order."""
        return [
            product
            for place in range(len(self.parts))
            for product in _opened(self._results[place], self._size(place))[0].tolist()
        ]

    @property
    def means(self) -> list[Tensor]:
        """The means of each part, (n,) float32; valid until the buffers are used again."""
        return [_opened(self._results[place], self._size(place))[1] for place in range(len(self.parts))]


def _result_bytes(count: int) -> int:
    return (1 + -(-count // CHUNK) + -(-count // 2)) * _WORD


def _opened(result: Tensor, count: int) -> tuple[Tensor, Tensor]:
    products = -(-count // CHUNK) * _WORD
    means = result[_WORD + products :].view(torch.float32)[:count]
    return result[_WORD : _WORD + products].view(torch.int64), means


def _digest(result: Tensor) -> int:
    """The sum of its words but the first, modulo 2^64, as a signed number."""
    return int(np.add.reduce(result[_WORD:].numpy().view(np.int64), dtype=np.int64))
