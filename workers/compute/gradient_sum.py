"""The sum of an instance's microbatch gradients, and the set of microbatches that are in it (DESIGN §5).

Float sums depend on their order, so that a lost or added worker would change the weights. Exact mode adds
q = round(g · 2^44) in int64 instead: integer sums do not depend on order. Multiplying fp32 by a power of two
is exact; rounding changes a gradient by at most 2^-45 (3e-14) per microbatch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from schemas.errors import GradientRefused
from workers.compute.sum_in_parts import PartBuffers, SumInParts
from workers.fixed_point.kernel import kernel
from workers.fixed_point.packing import CHUNK as _FIXED_CHUNK
from workers.fixed_point.packing import chunks

FRACTION_BITS = 44
_SCALE = 2.0**FRACTION_BITS
_BIAS = 1.5 * 2.0 ** (52 - FRACTION_BITS)
"""Near this value float64 numbers are 2^-44 apart. So adding it to g rounds g as the product is rounded, half
to even, and the bits of the sum, read as an integer, are q plus a constant. That saves the conversion, which
costs most."""
_BIAS_WORD = int(np.float64(_BIAS).view(np.int64))
_BIASED_MOST = _BIAS / 3 - 1
"""The largest |g| for which that spacing holds."""
_CHUNK = 1 << 16
"""Elements quantised and added at once. They stay in the L2 cache, so that each gradient is read from memory
twice, and each sum is read and written once."""

_CHECKSUM_SEED = 0x444D5343


class GradientSum:
    """Adds gradients of one stage's parameters, each microbatch at most once.

    It is deliberately not thread-safe: only the compute thread adds, reads and clears, so that the set of
    microbatches always matches the sum.

    Args:
        parameters: The stage's trained parameters, whose order is used everywhere here.
        exact: True: int64 fixed point; False: fp32 in order of arrival.
        microbatches: M, the microbatches of a step. Each may use 2^62/M of the range, so that no sum wraps.
        uses: The most layers of the whole model that share a parameter; each adds a gradient of its own.
        compiled: Whether the kernel adds, where there is one (ADR-0063); the bits are the same.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        exact: bool,
        microbatches: int,
        uses: int = 1,
        *,
        compiled: bool = True,
    ) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        self._exact = exact
        self._count = microbatches
        self._limit = 2.0 ** (62 - FRACTION_BITS) / (microbatches * uses) if exact else math.inf
        device = parameters[0].device if parameters else torch.device("cpu")
        kind = torch.int64 if exact else torch.float32
        total = sum(self._sizes)
        self._sum = torch.empty(total, dtype=kind, device=device)  # zeros without members, see `total`
        self._incomplete = False  # True during an addition, and after one that failed
        self._chunk = torch.empty(min(_CHUNK, total), dtype=torch.float32, device=device)
        self._words = torch.empty(self._chunk.numel(), dtype=torch.int64, device=device)
        self._on_host = device.type == "cpu"
        self._host_kernel = kernel() if exact and compiled else None
        self._kernel = self._host_kernel if self._on_host else None
        self._spare: Tensor | None = None
        self._buffers: PartBuffers | None = None
        self._members: set[int] = set()

    @property
    def microbatches(self) -> frozenset[int]:
        """The microbatches in the sum; updated by the adding thread right after each addition."""
        return frozenset(self._members)

    @property
    def bytes(self) -> int:
        return self._sum.nbytes

    def add(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        further: Sequence[tuple[int, Tensor | None]] = (),
    ) -> None:
        """Adds one microbatch's gradients, in parameter order; None for an unused parameter.

        `further` are (place of a parameter, gradient) of layers that use it too.

        All gradients are checked before the first is added, so that a refusal leaves the sum unchanged. If an
        addition fails nevertheless (a failing device), the sum can't be read any more.

        Raises:
            GradientRefused: A gradient is not finite or beyond the range, or this microbatch is in the sum
                already.
        """
        if microbatch in self._members:
            raise GradientRefused(f"microbatch {microbatch} is in this step's sum already")
        if len(gradients) != len(self._sizes):
            raise GradientRefused(f"{len(gradients)} gradients for {len(self._sizes)} parameters")
        flats = [None if gradient is None else gradient.reshape(-1).float() for gradient in gradients]
        more = [(at, gradient.reshape(-1).float()) for at, gradient in further if gradient is not None]
        first = self._exact and not self._members  # overwrites the sum of a former step
        targets = torch.split(self._sum if first else self.total, self._sizes)
        self._incomplete = True
        if not self._add_compiled(flats, more, targets, first):
            self._incomplete = False  # nothing was added so far
            self._add_checked(microbatch, flats, more, targets, first)
        self._members.add(microbatch)
        self._incomplete = False

    def _add_compiled(
        self,
        flats: Sequence[Tensor | None],
        more: Sequence[tuple[int, Tensor]],
        targets: Sequence[Tensor],
        first: bool,
    ) -> bool:
        """Adds all with the kernel, in one pass; False: nothing was added, since it can't add these."""
        if self._kernel is None:
            return False
        addends = []
        for flat, target in zip(flats, targets, strict=True):
            if flat is not None:
                addends.append((flat.contiguous(), target, first))
            elif first:
                target.zero_()
        addends += [(flat.contiguous(), targets[at], False) for at, flat in more]
        return self._kernel.add(addends, self._limit)

    def _add_checked(
        self,
        microbatch: int,
        flats: Sequence[Tensor | None],
        more: Sequence[tuple[int, Tensor]],
        targets: Sequence[Tensor],
        first: bool,
    ) -> None:
        """Checks all gradients, then adds them with torch."""
        largest = [
            self._check(microbatch, index, flat) if flat is not None and flat.numel() else 0.0
            for index, flat in enumerate(flats)
        ]
        most_of_more = [self._check(microbatch, at, flat) if flat.numel() else 0.0 for at, flat in more]
        self._incomplete = True
        for flat, target, most in zip(flats, targets, largest, strict=True):
            if flat is not None:
                self._accumulate(flat, target, first, most)
            elif first:
                target.zero_()
        for (at, flat), most in zip(more, most_of_more, strict=True):
            self._accumulate(flat, targets[at], False, most)

    def _check(self, microbatch: int, index: int, flat: Tensor) -> float:
        """The largest absolute value; raises `GradientRefused` if it can't be summed."""
        low, high = torch.stack(torch.aminmax(flat)).tolist()  # both are NaN if any element is
        largest: float = max(-low, high)
        if math.isfinite(low) and math.isfinite(high) and largest <= self._limit:
            return largest
        if math.isfinite(largest) and self._exact:
            raise GradientRefused(
                f"microbatch {microbatch}: the gradient of parameter {index} reaches {largest:.3g}, beyond "
                f"{self._limit:.3g} of exact accumulation; lower the learning rate or scale the loss",
                microbatch=microbatch,
            )
        raise GradientRefused(
            f"microbatch {microbatch}: the gradient of parameter {index} is not finite; "
            "lower the learning rate, or look at this microbatch's data",
            microbatch=microbatch,
        )

    def _accumulate(self, flat: Tensor, target: Tensor, first: bool, largest: float) -> None:
        if not self._exact:
            target.add_(flat)
        elif self._on_host and largest <= _BIASED_MOST:
            self._accumulate_biased(flat, target, first)
        else:
            self._accumulate_scaled(flat, target, first)

    def _accumulate_scaled(self, flat: Tensor, target: Tensor, first: bool) -> None:
        for begin in range(0, flat.numel(), _CHUNK):
            part, sums = flat[begin : begin + _CHUNK], target[begin : begin + _CHUNK]
            chunk, words = self._chunk[: part.numel()], self._words[: part.numel()]
            torch.mul(part, _SCALE, out=chunk).round_()
            if first:  # writes no zeroes and reads no sum: a third of the memory traffic
                sums.copy_(chunk)
            else:
                sums.add_(words.copy_(chunk))

    def _accumulate_biased(self, flat: Tensor, target: Tensor, first: bool) -> None:
        """Computes the same sums in half the time, with numpy.

        torch multiplies each addend by `alpha`, and present vector units do not multiply int64 fast.
        """
        gradient, total, words = flat.detach().numpy(), target.numpy(), self._words.numpy()
        for begin in range(0, gradient.size, _CHUNK):
            part, sums = gradient[begin : begin + _CHUNK], total[begin : begin + _CHUNK]
            own = words[: part.size]
            wide = own.view(np.float64)
            np.copyto(wide, part)
            np.add(wide, _BIAS, out=wide)
            if first:
                np.subtract(own, _BIAS_WORD, out=sums)
            else:
                np.subtract(own, _BIAS_WORD, out=own)
                np.add(sums, own, out=sums)

    @property
    def total(self) -> Tensor:
        """The sum itself, flat, (parameters,) int64 or fp32; valid until the next `add`."""
        if self._incomplete and self._members:
            raise RuntimeError("an addition of gradients broke off: the sum is worth nothing")
        return self._sum if self._members else self._sum.zero_()

    def copy_for_reduce(self) -> Tensor:
        """A copy of `total`, so that a failed all-reduce does not spoil the sum.

        The caller passes it to `give_back` after use, except after a failed all-reduce, whose thread may
        still be writing into it.
        """
        copy, self._spare = self._spare, None
        if copy is None:
            copy = torch.empty_like(self._sum)
        return copy.copy_(self.total)

    def give_back(self, copy: Tensor) -> None:
        """Lets the next `copy_for_reduce` reuse this memory: new pages cost eight times the copy."""
        self._spare = copy

    @property
    def in_parts(self) -> bool:
        """Whether members all-reduce it in parts. It is the same for all members, whatever their devices."""
        return self._exact

    def begin_parts(self, rank: int, shares: Sequence[float]) -> SumInParts:
        """Packs what the other members need of the sum, on the host; a failed reduction does not spoil it.

        The caller passes it to `finish_parts` after the exchange, except after a failed one, whose thread may
        still be writing into its memory.
        """
        buffers, self._buffers = self._buffers or PartBuffers(), None
        return SumInParts(
            self.total.cpu(),
            self.microbatches,
            rank=rank,
            shares=shares,
            kernel=self._host_kernel,
            finish=self._finish_part,
            buffers=buffers,
        )

    def finish_parts(self, parts: SumInParts) -> tuple[list[Tensor], str]:
        """`finish` of the sum over all members; the next `begin_parts` reuses the memory of this one."""
        means = [torch.empty(shape, dtype=torch.float32) for shape in self._shapes]
        ends = list(itertools.accumulate(self._sizes))
        for part, found in zip(parts.parts, parts.means, strict=True):
            for mean, size, end in zip(means, self._sizes, ends, strict=True):
                first, last = max(end - size, part.start), min(end, part.stop)
                if first < last:
                    own = found[first - part.start : last - part.start]
                    mean.view(-1)[first - end + size : last - end + size] = own
        self._buffers = parts.buffers
        return [mean.to(self._sum.device) for mean in means], _combined(sum(self._sizes), parts.products)

    def _finish_part(self, part: Tensor, means: Tensor) -> list[int]:
        """Writes the means of whole chunks of a sum, and returns the products of their checksum.

        It reads nothing that changes, since another thread calls it.
        """
        weights = _weights(part.device)
        products = []
        for chunk in chunks(part.numel()):
            own, mean = part[chunk], means[chunk]
            if self._host_kernel is not None:
                products.append(self._host_kernel.finish(own, weights, mean, *self._divisor()))
            else:
                self._write_means(own, mean)
                products.append(int(torch.dot(own, weights[: own.numel()])))
        return products

    def finish(self, flat: Tensor) -> tuple[list[Tensor], str]:
        """`to_gradients` and `checksum`, in one pass where there is a kernel."""
        if self._kernel is None:
            return self.to_gradients(flat), self.checksum(flat)
        divisor, factor = self._divisor()
        weights = _weights(flat.device)
        products = [0] * -(-flat.numel() // _FIXED_CHUNK)
        # One tensor each: they take the memory that the last microbatch's gradients have just left.
        means = [torch.empty(shape, dtype=torch.float32) for shape in self._shapes]
        begin = 0
        for mean in means:
            flat_mean, end = mean.view(-1), begin + mean.numel()
            for first, last in _pieces(begin, end):
                product = self._kernel.finish(
                    flat[first:last],
                    weights[first % _FIXED_CHUNK :],
                    flat_mean[first - begin : last - begin],
                    divisor,
                    factor,
                )
                products[first // _FIXED_CHUNK] += product
            begin = end
        return means, _combined(flat.numel(), products)

    def to_gradients(self, flat: Tensor) -> list[Tensor]:
        """The mean gradient over the step's M microbatches, fp32, in the parameters' shapes."""
        mean = torch.empty(flat.numel(), dtype=torch.float32, device=flat.device)
        if self._exact:
            for chunk in chunks(flat.numel()):
                self._write_means(flat[chunk], mean[chunk])
        else:
            torch.div(flat, self._count, out=mean)
        return [
            part.view(shape) for part, shape in zip(torch.split(mean, self._sizes), self._shapes, strict=True)
        ]

    def _write_means(self, sums: Tensor, means: Tensor) -> None:
        divisor, factor = self._divisor()
        wide = sums.double()
        means.copy_(wide.mul_(factor) if factor else wide.div_(divisor))

    def _divisor(self) -> tuple[float, float]:
        """What a sum is divided by, and 1 / that if the product has the bits of the quotient; otherwise 0."""
        divisor = _SCALE * self._count  # exact in float64 for every M below 2^53
        return divisor, 1 / divisor if math.frexp(divisor)[0] == 0.5 else 0.0

    def clear(self) -> None:
        """Forgets the step: with an empty set, the buffer's content is ignored."""
        self._members.clear()

    @staticmethod
    def checksum(flat: Tensor) -> str:
        """The checksum of a flat tensor, 16 hex digits; swapping two different elements changes it.

        Each chunk gives a dot product with fixed odd 64-bit weights, modulo 2^64; a polynomial combines the
        chunks. It detects divergence, not forgery, and takes 0.5 ms per million int64.
        """
        words = flat if flat.dtype == torch.int64 else flat.view(torch.int32)
        weights = _weights(flat.device)
        sums: list[Tensor] = []
        for begin in range(0, words.numel(), _FIXED_CHUNK):
            part = words[begin : begin + _FIXED_CHUNK].to(torch.int64)
            own = weights[: part.numel()]
            # CUDA has no dot product of integers; on the CPU it is faster by half, with the same result.
            sums.append((part * own).sum() if flat.is_cuda else torch.dot(part, own))
        return _combined(words.numel(), torch.stack(sums).tolist() if sums else [])

    @staticmethod
    def squared_norms(gradients: Sequence[Tensor]) -> tuple[float, ...]:
        """Each gradient's squared L2 norm in float64, independent of the cut into stages."""
        return tuple(sum(_squares(gradient.reshape(-1)), 0.0) for gradient in gradients)


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of `begin` … `end`-1 that lie in one chunk of the checksum each."""
    while begin < end:
        last = min(end, begin - begin % _FIXED_CHUNK + _FIXED_CHUNK)
        yield begin, last
        begin = last


def _combined(length: int, products: Iterable[int]) -> str:
    """The checksum of a tensor of that many elements from the products of its chunks."""
    total = length
    for product in products:
        total = (total * 0x9E3779B97F4A7C15 + product) & 0xFFFFFFFFFFFFFFFF
    return f"{total:016x}"


def _weights(device: torch.device) -> Tensor:
    weights = _weights_by_device.get(device)
    if weights is None:
        generator = torch.Generator().manual_seed(_CHECKSUM_SEED)
        numbers = torch.randint(-(2**62), 2**62, (_FIXED_CHUNK,), generator=generator, dtype=torch.int64)
        weights = _weights_by_device[device] = (numbers * 2 + 1).to(device)
    return weights


_weights_by_device: dict[torch.device, Tensor] = {}


def _squares(flat: Tensor) -> Iterator[float]:
    for begin in range(0, flat.numel(), _FIXED_CHUNK):
        part = flat[begin : begin + _FIXED_CHUNK].double()
        yield float(torch.dot(part, part))
