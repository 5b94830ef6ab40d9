"""Frozen linear layers whose weights are int8, with a scale for each row (`model.quantize: int8`).

    scale[r] = max |weight[r]| ÷ 127        int8[r] = weight[r] ÷ scale[r], rounded half to even

Each row is quantised by itself, from the weight in its own type: to the same bits on every instance, whatever
the cut, whether the weight was built or read from files in pieces. It is multiplied out again where it is
used, in the forward and in the backward pass, and nothing of that is kept in between.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from schemas.errors import BadModel
from workers.build.model_tensors import modules_of

_LARGEST = 127


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, columns) of any float type → int8 of that shape, and (rows,) float32 scales."""
    wide = rows.to(torch.float32, copy=True)
    scale = torch.linalg.vector_norm(wide, torch.inf, dim=1) / _LARGEST
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    wide.div_(divisor.unsqueeze(1)).round_().clamp_(-_LARGEST, _LARGEST)
    return wide.to(torch.int8), scale


def dequantized(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 (rows, columns) times (rows,) float32 scales, rounded to `dtype`."""
    return weight.float().mul_(scale.unsqueeze(1)).to(dtype)


class Int8Linear(nn.Linear):
    """A linear layer with a frozen int8 weight; its bias is as it was.

    Attributes:
        weight_int8: (out_features, in_features) int8.
        weight_scale: (out_features,) float32.
        dtype: Type that the weight had, and that `weight` has.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        weight, scale = quantized(linear.weight.detach())
        self.weight_int8 = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias
        self.train(linear.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # of nn.Linear it is a parameter
        """The weight in its own type; a copy."""
        return dequantized(self.weight_int8, self.weight_scale, self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features), in the type of the weight, or of autocast."""
        kind, dtype = input.device.type, self.dtype
        bias: Tensor | None = self.bias
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):  # not on `meta`
            dtype = torch.get_autocast_dtype(kind)
            input = input.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        product: Any = _Int8Product
        output: Tensor = product.apply(input, self.weight_int8, self.weight_scale, dtype)
        return output if bias is None else output + bias

    @torch.no_grad()
    def fill(self, first_row: int, rows: Tensor) -> None:
        """Takes (some rows, in_features) of a weight, of any float type, as of `first_row`."""
        weight, scale = quantized(rows.to(self.dtype))
        self.weight_int8[first_row : first_row + len(rows)].copy_(weight)
        self.weight_scale[first_row : first_row + len(rows)].copy_(scale)


class _Int8Product(torch.autograd.Function):
    """input · weightᵀ; autograd keeps the int8 weight, not the one that it stands for."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(weight, scale)
        return functional.linear(input, dequantized(weight, scale, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        weight, scale = ctx.saved_tensors
        return gradient.matmul(dequantized(weight, scale, gradient.dtype)), None, None, None


def quantize(model: Any) -> None:
    """Makes those linear layers of a model int8 whose weights are frozen and nobody else's, in place.

    Raises:
        BadModel: There are none.
    """
    modules = [module for _, module in modules_of(model)]
    owners = Counter(id(weight) for module in modules for weight in module._parameters.values())
    places: dict[int, tuple[nn.Linear, list[tuple[nn.Module, str]]]] = {}
    for parent in modules:
        for name, child in parent._modules.items():
            if isinstance(child, nn.Linear) and _is_plain(child) and owners[id(child.weight)] == 1:
                places.setdefault(id(child), (child, []))[1].append((parent, name))
    if not places:
        raise BadModel(
            "model.quantize: int8 is for frozen weights of linear layers (nn.Linear), and this model has "
            "none: name what is not trained in model.freeze, train adapters (lora), or leave it out"
        )
    modules, parent, child = [], None, None  # type: ignore[assignment]  # each is freed once it is replaced
    while places:
        linear, its = places.pop(next(iter(places)))
        made = Int8Linear(linear)
        for parent, name in its:
            parent._modules[name] = made


def _is_plain(linear: nn.Linear) -> bool:
    """Whether it is frozen, and computes what its class says."""
    return (
        type(linear).forward is nn.Linear.forward
        and not linear.weight.requires_grad
        and linear.weight.is_floating_point()
    )
