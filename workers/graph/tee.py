"""A wire with several readers: their gradients are added in one order, however the model is cut.

Autograd adds gradients in the order in which they arrive. Floating-point sums of three depend on it, and a
cut changes it. A tee hands each reader a branch of its own and adds from the last reader to the first; a
stage behind the cut adds its own part first, which is the same nesting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workers.graph.model_graph import Value


class _Tee(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, branches: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for _ in range(branches))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        total: Tensor | None = None
        for gradient in reversed(gradients):
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total, None


def tee(value: Value, branches: int) -> tuple[Value, ...]:
    """As many branches of a tensor; each has its values, and their gradients are added from the last to the
    first."""
    if (
        branches == 1
        or not isinstance(value, Tensor)
        or not value.requires_grad
        or not torch.is_grad_enabled()
    ):
        return (value,) * branches
    split: tuple[Tensor, ...] = _Tee.apply(value, branches)  # type: ignore[no-untyped-call]  # torch: unannotated
    return split
