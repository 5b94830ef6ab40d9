"""Dynamic loss scaling: which power of two the loss of a step is multiplied by.

Small gradients vanish in fp16. Multiplied by the scale they do not; the sums of gradients, which are wider,
get them divided by it again. Both are exact. The scale is a fold over the steps: one that is left out halves
it, some applied in a row double it (as `torch.amp.GradScaler`). So whoever has the state after a step has the
scale of the next one, and each decision records the number.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from schemas.errors import Conflict
from schemas.job_file.training import LossScaleSpec

LEAST, MOST = 2.0**-16, 2.0**64
"""Bounds of the scale. Where gradients overflow even at the least one, their microbatch is at fault."""


class LossScale:
    """The scale of the open step; `applied` steps in a row have left it as it is."""

    def __init__(self, spec: LossScaleSpec) -> None:
        self.spec = spec
        self.scale, self.applied = spec.init_scale, 0

    @property
    def is_least(self) -> bool:
        return self.scale <= LEAST

    def apply(self) -> None:
        """A step was applied."""
        self.applied += 1
        if 0 < self.spec.growth_interval <= self.applied:
            self.scale, self.applied = min(MOST, self.scale * 2), 0

    def skip(self) -> None:
        """A step was left out, for whatever reason."""
        self.scale, self.applied = max(LEAST, self.scale / 2), 0

    def to_tensor(self) -> Tensor:
        """(scale, applied), (2,) float64."""
        return torch.tensor([self.scale, self.applied], dtype=torch.float64)

    @staticmethod
    def check(state: Tensor | None) -> None:
        """Raises `Conflict` if this is no state of a loss scale; None is none, and begins anew."""
        if state is None:
            return
        if state.shape != (2,) or not state.is_floating_point():
            raise Conflict("the loss scale that came is none")
        scale, applied = state.tolist()
        if not LEAST <= scale <= MOST or math.frexp(scale)[0] != 0.5 or not 0 <= applied < 2**53:
            raise Conflict(f"the loss scale that came is {scale:g}, after {applied:g} steps")

    def load(self, state: Tensor | None) -> None:
        """Takes the state of another place; None: of a job that had no loss scale."""
        if state is None:
            self.scale, self.applied = self.spec.init_scale, 0
        else:
            scale, applied = state.tolist()
            self.scale, self.applied = scale, int(applied)
