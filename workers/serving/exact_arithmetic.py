"""Arithmetic in which a row's bits depend on its own session alone, whoever computes beside it (ADR-0130).

Three rules, each found by measurement; `probe` checks them where an instance starts:
- Row counts come from a short list of multiples of 4 × threads. Products of fewer than 4 rows use other
  kernels, and a split among threads that leaves odd ends does, too.
- A row at position p attends to the keys of its own block of 64 and all before it, never to more: how many
  keys a kernel is given is a function of the position, in prefill as in decoding.
- Attention is always given a mask, and rows in multiples of 4: one kernel for all.

`arithmetic_fingerprint` names an arithmetic: replicas of a stage with the same one give the same bits.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from workers.serving.prepacked import PrepackedWeight

KEYS = 64
"""Keys are given to attention in whole blocks of this many."""

ROWS = 4
"""Rows of a product, and of a call of attention, are a multiple of this many."""

_FEW = 8
"""For so few rows keys and values are read once in front of the kernel, which waits for memory far longer if
it is the first to read them: a token's attention takes a quarter less with the sums that nobody needs."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How rows are computed.

    Attributes:
        threads: Threads of torch's operations.
        rows: Rows of a wave are a multiple of this; 0: of 4 × threads.
        keys: Keys of a row are whole blocks of this many; 1: as many as there are.
        exact: Whether rows and keys are padded at all. Without, attention is torch's as it comes.
    """

    threads: int = 1
    rows: int = 0
    keys: int = KEYS
    exact: bool = True

    @property
    def row_unit(self) -> int:
        """Rows of a wave are a multiple of this many."""
        return 1 if not self.exact else self.rows or ROWS * self.threads

    def padded(self, rows: int) -> int:
        """Rows that are computed for a wave of this many: see `row_counts`.

        Small waves grow by the unit, larger ones by an eighth: few counts, each of which can be probed, and
        at most an eighth of the work is padding.
        """
        if not self.exact:
            return rows
        unit = self.row_unit
        if rows > 8 * unit:
            unit *= 1 << max(0, (rows // (8 * unit)).bit_length() - 1)
        return -(-rows // unit) * unit

    def row_counts(self, most: int) -> list[int]:
        """All counts that waves of 1 … `most` rows are padded to."""
        return sorted({self.padded(rows) for rows in range(1, most + 1)})


@dataclass(frozen=True, slots=True)
class RowSegment:
    """Rows of one session that one call of attention computes.

    Attributes:
        begin: The first of its rows in the wave.
        end: The row behind its last.
        position: The first row's position in its session.
        keys: Keys that it is given: positions 0 … keys - 1.
    """

    begin: int
    end: int
    position: int
    keys: int


def segments(begin: int, rows: int, position: int, arithmetic: Arithmetic) -> Iterator[RowSegment]:
    """Cuts a session's rows where their number of keys changes."""
    block = arithmetic.keys if arithmetic.exact else 0
    end = begin + rows
    while begin < end:
        size = min(end - begin, block - position % block) if block > 1 else end - begin
        last = position + size
        yield RowSegment(begin, begin + size, position, -(-last // block) * block if block else last)
        begin, position = begin + size, last


class CausalMask:
    """Masks of segments as views of one tensor, which grows with the longest session."""

    def __init__(self) -> None:
        self._table = _mask_table(KEYS)

    def of(self, position: int, rows: int, keys: int) -> Tensor:
        """(rows, keys) float32: 0 where a key is seen, −inf where it lies behind its row."""
        offset = position % KEYS
        if keys % KEYS or offset + rows > self._table.shape[0]:  # only without exact arithmetic
            ahead = torch.arange(keys)[None] > (position + torch.arange(rows))[:, None]
            return torch.zeros(rows, keys).masked_fill_(ahead, -math.inf)
        if keys > self._table.shape[1]:
            self._table = _mask_table(max(keys, 2 * self._table.shape[1]))
        return self._table[offset : offset + rows, self._table.shape[1] - keys :]


def _mask_table(keys: int) -> Tensor:
    """Rows of a block over its own keys and all before; padding rows behind the block see everything."""
    table = torch.zeros(KEYS + ROWS, keys)
    ahead = torch.ones(KEYS, KEYS, dtype=torch.bool).triu(1)
    table[:KEYS, keys - KEYS :].masked_fill_(ahead, -math.inf)
    return table


def attend(
    query: Tensor, keys: Tensor, values: Tensor, count: int, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Attention of one segment by torch's fused kernel.

    Args:
        query: (heads, rows, width) float32, padding included.
        keys: (key heads, positions, width); at least `count` positions.
        values: (key heads, positions, value width), likewise.
        count: Keys that it is given: positions 0 … count - 1.
        mask: (rows, count) of `CausalMask`; None: each row sees all keys.
        scale: Factor of the scores; None: 1/√width.

    Returns:
        (rows, key heads, heads per key head, value width): a view.
    """
    heads, rows, width = query.shape
    key_heads = keys.shape[0]
    if count < keys.shape[1]:
        keys, values = keys.narrow(1, 0, count), values.narrow(1, 0, count)
    if 1 < rows <= _FEW:
        for tensor in (keys, values):
            tensor.sum()
    keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    groups = heads // key_heads
    if groups == 1:
        grouped = query.unsqueeze(0)
    else:  # heads that share keys become samples, so that no key is copied
        grouped = query.view(key_heads, groups, rows, width).transpose(0, 1)
        keys, values = keys.expand(groups, -1, -1, -1), values.expand(groups, -1, -1, -1)
    found = functional.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
    return found.permute(2, 1, 0, 3)


def arithmetic_fingerprint(arithmetic: Arithmetic, prepacked: int = 0) -> str:
    """Instruction set, torch's build, threads, paddings and products in words, and a digest of their results.

    The digest is there because libraries choose kernels by more than the instruction set, such as the
    processor's maker. Threads are those that torch has at the moment.

    Args:
        arithmetic: How rows are computed.
        prepacked: How many weights are laid out: their products have other bits (`prepacked`).

    Returns:
        One line; equal on instances that may be replicas of each other.
    """
    build = hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:8]
    padding = f"rows {arithmetic.row_unit}, keys {arithmetic.keys}" if arithmetic.exact else "plain"
    return ", ".join(
        (
            f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            f"torch {torch.__version__} {build}",
            f"threads {torch.get_num_threads()}",
            padding,
            f"{prepacked} weights laid out",
            f"results {_results(bool(prepacked))}",
        )
    )


@torch.inference_mode()
def _results(prepacked: bool) -> str:
    """A digest of products, attention and functions of fixed numbers."""
    generator = torch.Generator().manual_seed(20)
    rows = torch.randn(64, 320, generator=generator)
    weight = torch.randn(448, 320, generator=generator) / 16
    product = functional.linear(rows, weight)
    heads = product.view(1, 64, 7, 64).transpose(1, 2)
    found = [
        product,
        functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        functional.silu(product),
        functional.gelu(product),
        torch.softmax(product, -1),
        functional.layer_norm(product, (448,)),
        torch.exp(product),
        torch.cos(product),
    ]
    if prepacked:
        found.append(PrepackedWeight.of(weight).product(rows, None))
    digest = hashlib.blake2b(digest_size=8)
    for tensor in found:
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
