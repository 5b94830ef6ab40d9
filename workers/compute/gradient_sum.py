"""The sum of an instance's microbatch gradients, and the set of microbatches that are in it (DESIGN §5).

Float sums depend on their order, so that losing or adding a worker would change the weights. Exact mode
adds q = round(g · 2^44) in int64 instead: integer sums do not depend on order. Multiplying fp32 by a power
of two is exact; what is rounded off is at most 2^-45 (3e-14) per microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from schemas.errors import GradientRefused

FRACTION_BITS = 44
_SCALE = 2.0**FRACTION_BITS
_BIAS = 1.5 * 2.0 ** (52 - FRACTION_BITS)
"""Float64 counts in steps of 2^-44 around it. So adding it rounds g as the product would be rounded, half to
even, and the sum's bits, read as an integer, are q and a constant: no conversion, which costs most."""
_BIAS_WORD = int(np.float64(_BIAS).view(np.int64))
_BIASED_MOST = _BIAS / 3 - 1
"""The largest |g| that stays within those steps."""
_CHUNK = 1 << 16
"""Elements quantised and added at once: they stay in the L2 cache, so that memory sees each gradient read
twice and each sum read and written once."""
_FIXED_CHUNK = 1 << 16
"""Of checksums and norms: their bits depend on it."""

_CHECKSUM_SEED = 0x444D5343


class GradientSum:
    """Adds gradients of one stage's parameters, each microbatch at most once.

    Not thread-safe by intent: the compute thread alone adds, reads and clears, so that the set of
    microbatches always tells what is in the sum.

    Args:
        parameters: the stage's trained parameters; fixes the order of everything here.
        exact: int64 fixed point; otherwise fp32 in order of arrival.
        microbatches: M of a step. A microbatch may use 2^62/M of the range, so that no sum wraps.
    """

    def __init__(self, parameters: Sequence[Tensor], exact: bool, microbatches: int) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        self._sizes = [parameter.numel() for parameter in parameters]
        self._exact = exact
        self._count = microbatches
        self._limit = 2.0 ** (62 - FRACTION_BITS) / microbatches if exact else math.inf
        device = parameters[0].device if parameters else torch.device("cpu")
        kind = torch.int64 if exact else torch.float32
        total = sum(self._sizes)
        self._sum = torch.zeros(total, dtype=kind, device=device)
        self._torn = False  # an addition did not come to its end
        self._chunk = torch.empty(min(_CHUNK, total), dtype=torch.float32, device=device)
        self._words = torch.empty(self._chunk.numel(), dtype=torch.int64, device=device)
        self._on_host = device.type == "cpu"
        self._spare: Tensor | None = None
        self._members: set[int] = set()

    @property
    def microbatches(self) -> frozenset[int]:
        """What is in the sum; updated by the thread that adds, right after adding."""
        return frozenset(self._members)

    @property
    def bytes(self) -> int:
        return self._sum.numel() * self._sum.element_size()

    def add(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Adds one microbatch's gradients, in parameter order; None for an unused parameter.

        All of it is checked before any of it is added: a refusal leaves no residue, and what was checked can
        be added. Should an addition break off all the same (a device that fails), the sum refuses to be read.

        Raises:
            GradientRefused: not finite, beyond the range, or this microbatch is in the sum already.
        """
        if microbatch in self._members:
            raise GradientRefused(f"microbatch {microbatch} is in this step's sum already")
        if len(gradients) != len(self._sizes):
            raise GradientRefused(f"{len(gradients)} gradients for {len(self._sizes)} parameters")
        flats = [None if gradient is None else gradient.reshape(-1).float() for gradient in gradients]
        largest = [
            self._checked(microbatch, index, flat) if flat is not None and flat.numel() else 0.0
            for index, flat in enumerate(flats)
        ]
        first = self._exact and not self._members  # overwrites what a step gone by has left
        targets = torch.split(self._sum if first else self.total, self._sizes)
        self._torn = True
        for flat, target, most in zip(flats, targets, largest, strict=True):
            if flat is not None:
                self._accumulate(flat, target, first, most)
            elif first:
                target.zero_()
        self._members.add(microbatch)
        self._torn = False

    def _checked(self, microbatch: int, index: int, flat: Tensor) -> float:
        """The largest absolute value. Raises `GradientRefused`."""
        low, high = torch.stack(torch.aminmax(flat)).tolist()  # NaN comes through both
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
            if first:  # neither zeroes to write nor a sum to read: a third of the memory traffic
                sums.copy_(chunk)
            else:
                sums.add_(words.copy_(chunk))

    def _accumulate_biased(self, flat: Tensor, target: Tensor, first: bool) -> None:
        """The same sums in half the time. By numpy: torch multiplies what it adds by `alpha`, and no vector
        unit of today multiplies int64 fast."""
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
        """The sum itself, flat, (parameters,) int64 or fp32; holds until the next `add`."""
        if self._torn and self._members:
            raise RuntimeError("an addition of gradients broke off: the sum is worth nothing")
        return self._sum if self._members else self._sum.zero_()

    def copy_for_reduce(self) -> Tensor:
        """A copy of `total`: a broken all-reduce spoils only that.

        Whoever has no more use for it hands it to `give_back`. A copy that an all-reduce broke with is not
        given back: a thread may still be writing into it.
        """
        copy, self._spare = self._spare, None
        if copy is None:
            copy = torch.empty_like(self._sum)
        return copy.copy_(self.total)

    def give_back(self, copy: Tensor) -> None:
        """The next `copy_for_reduce` uses this memory again: fresh pages cost eight times the copying."""
        self._spare = copy

    def to_gradients(self, flat: Tensor) -> list[Tensor]:
        """The mean gradient over the step's M microbatches, fp32, in the parameters' shapes."""
        mean = torch.empty(flat.numel(), dtype=torch.float32, device=flat.device)
        if self._exact:
            divisor = _SCALE * self._count  # exact in float64 for every M below 2^53
            power_of_two = math.frexp(divisor)[0] == 0.5  # then a product has the bits of the quotient
            wide = torch.empty(self._chunk.numel(), dtype=torch.float64, device=flat.device)
            for begin in range(0, flat.numel(), _CHUNK):
                part = flat[begin : begin + _CHUNK]
                own = wide[: part.numel()].copy_(part)
                own = own.mul_(1 / divisor) if power_of_two else own.div_(divisor)
                mean[begin : begin + _CHUNK].copy_(own)
        else:
            torch.div(flat, self._count, out=mean)
        return [
            part.view(shape) for part, shape in zip(torch.split(mean, self._sizes), self._shapes, strict=True)
        ]

    def clear(self) -> None:
        """Forgets the step: with an empty set, whatever the buffer holds counts for nothing."""
        self._members.clear()

    @staticmethod
    def checksum(flat: Tensor) -> str:
        """16 hex digits over a flat tensor, order-sensitive: two different elements swapped change it.

        Each chunk is a dot product with fixed odd 64-bit weights, modulo 2^64; the chunks' results go
        through a polynomial. Guards against divergence, not against forgery. 0.5 ms per million int64.
        """
        words = flat if flat.dtype == torch.int64 else flat.view(torch.int32)
        weights = _weights(flat.device)
        sums: list[Tensor] = []
        for begin in range(0, words.numel(), _FIXED_CHUNK):
            part = words[begin : begin + _FIXED_CHUNK].to(torch.int64)
            own = weights[: part.numel()]
            # CUDA has no dot product of integers; on the CPU it is half as fast again, with the same result
            sums.append((part * own).sum() if flat.is_cuda else torch.dot(part, own))
        total = words.numel()
        for value in torch.stack(sums).tolist() if sums else []:
            total = (total * 0x9E3779B97F4A7C15 + value) & 0xFFFFFFFFFFFFFFFF
        return f"{total:016x}"

    @staticmethod
    def squared_norms(gradients: Sequence[Tensor]) -> tuple[float, ...]:
        """Each gradient's squared L2 norm in float64: independent of how stages group parameters."""
        return tuple(sum(_squares(gradient.reshape(-1)), 0.0) for gradient in gradients)


def _weights(device: torch.device) -> Tensor:
    found = _weights_by_device.get(device)
    if found is None:
        generator = torch.Generator().manual_seed(_CHECKSUM_SEED)
        drawn = torch.randint(-(2**62), 2**62, (_FIXED_CHUNK,), generator=generator, dtype=torch.int64)
        found = _weights_by_device[device] = (drawn * 2 + 1).to(device)
    return found


_weights_by_device: dict[torch.device, Tensor] = {}


def _squares(flat: Tensor) -> Iterator[float]:
    for begin in range(0, flat.numel(), _FIXED_CHUNK):
        part = flat[begin : begin + _FIXED_CHUNK].double()
        yield float(torch.dot(part, part))
