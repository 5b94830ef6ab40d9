"""fp32 masters of a stage's trained parameters in half precision.

Updates are smaller than half precision resolves. So the optimizer updates the masters, and each parameter is
its master, rounded. Masters are part of the state of training: they travel as the optimizer's state does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class Masters:
    """The masters of those of these (name, parameter) that are not fp32.

    Until the first step there are none to speak of: each is what its parameter is, since initial weights are
    loaded later than this is made.
    """

    def __init__(self, trained: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._weights = {name: weight for name, weight in trained if weight.dtype is not torch.float32}
        self._masters = {
            name: nn.Parameter(weight.detach().float()) for name, weight in self._weights.items()
        }
        self._begun = False

    def __bool__(self) -> bool:
        return bool(self._weights)

    def of(self, name: str, weight: nn.Parameter) -> nn.Parameter:
        """What the optimizer updates for a parameter: its master, or itself."""
        return self._masters.get(name, weight)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name → fp32 master; empty before the first step."""
        return {name: master.detach() for name, master in self._masters.items()} if self._begun else {}

    @torch.no_grad()
    def begin(self) -> None:
        """A step begins. At the first one the masters are taken from the parameters."""
        if not self._begun:
            self.load({})

    @torch.no_grad()
    def round(self) -> None:
        """The step is made: the parameters follow."""
        for name, weight in self._weights.items():
            weight.copy_(self._masters[name])

    @torch.no_grad()
    def load(self, masters: Mapping[str, Tensor]) -> None:
        """Takes the masters of another place, whose parameters are here; a missing one is its parameter."""
        for name, weight in self._weights.items():
            self._masters[name].copy_(masters.get(name, weight))
        self._begun = True
