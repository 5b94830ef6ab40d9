"""Lion: the sign of a momentum (Chen et al. 2023, https://arxiv.org/abs/2302.06675, program 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """θ ← θ − lr · (sign(β₁ m + (1 − β₁) g) + weight_decay · θ); then m ← β₂ m + (1 − β₂) g.

    State: `exp_avg`, as the parameter. Rates are three to ten times smaller than AdamW's.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), not {betas}")
        if weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, but is {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # torch's is overloaded
        for group in self.param_groups:
            fast, slow = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                average = state["exp_avg"]
                update = average.mul(fast).add_(weight.grad, alpha=1 - fast).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"])
                average.mul_(slow).add_(weight.grad, alpha=1 - slow)
