"""The exponential moving average of a stage's weights (EMA), as state beside the optimizer's.

It has the bits of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`: the first update
copies the weights, each later one moves towards them by `lerp`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from schemas.job_file.recipe import AverageSpec


class WeightAverage:
    """Shadows of trained weights, fp32 as these or their masters are; none before they begin."""

    def __init__(self, spec: AverageSpec) -> None:
        self.spec = spec
        self.shadows: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Follows the weights after `step` was applied. A step that is left out does not count."""
        if step < self.spec.start_step:
            return
        for name, weight in weights.items():
            shadow = self.shadows.get(name)
            if shadow is None:
                self.shadows[name] = weight.detach().clone()
            else:
                shadow.lerp_(weight.detach(), 1 - self.spec.decay)

    @contextlib.contextmanager
    def in_place_of(self, leaves: Sequence[tuple[str, nn.Parameter]]) -> Iterator[None]:
        """The parameters hold their shadows inside, as far as these have begun.

        A shared parameter is there once for each of its leaves: all change, as they do in stages apart.
        """
        kept = [(weight, weight.data) for name, weight in leaves if name in self.shadows]
        try:
            for name, weight in leaves:
                if name in self.shadows:
                    weight.data = self.shadows[name].to(weight.dtype)
            yield
        finally:
            for weight, data in kept:
                weight.data = data
