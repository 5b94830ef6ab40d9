"""Parts of a recipe as users write them: an optimizer, a schedule, a metric; some of them wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Heavy(torch.optim.Optimizer):
    """Heavy ball, as old code has it: it counts in its group, and changes the gradients that it is given."""

    def __init__(
        self, params: Iterable[Any], lr: float = 0.1, momentum: float = 0.9, decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        for group in self.param_groups:
            group["count"] += 1
            for weight in group["params"]:
                gradient = weight.grad
                gradient.add_(weight, alpha=group["decay"])
                state = self.state[weight]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(weight)
                state["velocity"].mul_(min(group["momentum"], 1 - 1 / group["count"])).add_(gradient)
                weight.sub_(state["velocity"], alpha=group["lr"])


def saw(step: int, total: int | None) -> float:
    """A schedule like no other."""
    return 1.0 - 0.2 * (step % 3)


def confidence(output: Tensor, targets: Tensor) -> dict[str, tuple[float, float]]:
    """The probability of what was right."""
    found = output.float().softmax(-1).gather(-1, targets.unsqueeze(-1))
    return {"confidence": (float(found.sum()), found.numel())}


def nothing(output: Tensor) -> dict[str, tuple[float, float]]:
    return {"nothing": (float("nan"), 1.0)}
