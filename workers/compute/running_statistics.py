"""Running statistics of normalising layers, whoever computes which microbatch.

A plain loop over the microbatches of a step, in order, leaves r ← (1−m)·r + m·s after each. So after all M of
them r is (1−m)^M·r plus the sum of m·(1−m)^(M−1−i)·s of microbatch i. Each term needs nothing but its
microbatch: they are summed in fixed point beside the gradients, and applied when the step is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_AVERAGES = ("running_mean", "running_var")


class RunningStatistics:
    """The running statistics in a stage.

    Args:
        module: The stage, on its device.
        microbatches: M, the microbatches of a step.
    """

    def __init__(self, module: nn.Module, microbatches: int) -> None:
        self._microbatches = microbatches
        self._norms = [part for part in module.modules() if keeps_statistics(part)]

    @property
    def buffers(self) -> list[Tensor]:
        """The averages that are kept, in a fixed order."""
        return [cast(Tensor, norm._buffers[name]) for norm in self._norms for name in _AVERAGES]

    @contextmanager
    def apart(self, microbatch: int, found: list[Tensor]) -> Iterator[None]:
        """Within, the layers leave their buffers alone; then `found` has the microbatch's terms, like
        `buffers`.

        Layers do not read their averages in training, so that what they compute is the same.
        """
        own = [dict(norm._buffers) for norm in self._norms]
        for (
            norm
        ) in self._norms:  # each microbatch its own: autograd keeps those of a forward for its backward
            norm._buffers.update(
                {name: torch.zeros_like(kept) for name, kept in norm._buffers.items() if kept is not None}
            )
        try:
            yield
            later = self._microbatches - 1 - microbatch
            for norm in self._norms:
                found += [cast(Tensor, norm._buffers[name]) * _decay(norm) ** later for name in _AVERAGES]
        finally:
            for norm, buffers in zip(self._norms, own, strict=True):
                norm._buffers.update(buffers)

    @torch.no_grad()
    def apply(self, totals: Sequence[Tensor]) -> None:
        """Ends a step: `totals` are the sums of its microbatches' terms, like `buffers`."""
        remaining = iter(totals)
        for norm in self._norms:
            for name in _AVERAGES:
                buffer = cast(Tensor, norm._buffers[name])
                buffer.mul_(_decay(norm) ** self._microbatches).add_(next(remaining))
            counted = norm._buffers.get("num_batches_tracked")
            if counted is not None:
                counted += self._microbatches


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a layer keeps running averages of a kind that can be summed exactly."""
    return (
        isinstance(module, _NormBase)
        and module.track_running_stats
        and module.momentum is not None
        and module._buffers.get("running_mean") is not None
    )


def _decay(norm: nn.Module) -> float:
    return 1.0 - cast(float, norm.momentum)
