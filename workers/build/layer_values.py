"""Values for one layer of a model whose weights are on `meta`: to time it and to check that it runs.

They are no initial values. They are cheap, alike everywhere, and small enough that no activation overflows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_PERIOD = 65_521
"""Values that are drawn once and repeated. A prime: no row of a matrix repeats the one before."""


@contextlib.contextmanager
def with_values(layer: nn.Module, device: torch.device | str) -> Iterator[nn.Module]:
    """The layer on `device`, each of its `meta` tensors with values; at the end it is as it was before.

    Matrices get uniform values of the variance 1 ÷ fan-in, other weights 1, biases and whole numbers 0.
    A tensor with several names in the layer stays one tensor.
    """
    target = torch.device(device)
    before = [
        (module, name, tensor)
        for module in layer.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]
    made: dict[int, Tensor] = {}
    attributes = [
        (module, key, value)
        for module in layer.modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules")
    ]
    try:
        for module, name, tensor in before:
            if id(tensor) not in made:
                own = _values(name, tensor, target) if tensor.is_meta else tensor.detach().to(target)
                if isinstance(tensor, nn.Parameter):
                    own = nn.Parameter(own, requires_grad=tensor.requires_grad)
                made[id(tensor)] = own
            setattr(module, name, made[id(tensor)])
        for module, name, value in attributes:
            if (filled := _filled(name, value, target, made)) is not value:
                vars(module)[name] = filled
        yield layer
    finally:
        made.clear()
        for module, name, value in attributes:
            vars(module)[name] = value
        for module, name, tensor in before:
            setattr(module, name, tensor)


def _filled(name: str, value: Any, device: torch.device, made: dict[int, Tensor]) -> Any:
    """A plain attribute with values for its tensors; itself, if it has none that lack them."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            return value
        return made.setdefault(id(value), _values(name, value, device))
    if type(value) in (list, tuple):
        items = [_filled(name, item, device, made) for item in value]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return type(value)(items) if changed else value
    if type(value) is dict:
        found = {key: _filled(str(key), item, device, made) for key, item in value.items()}
        return found if any(found[key] is not value[key] for key in value) else value
    return value


def _values(name: str, meta: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=device)
    if not meta.is_floating_point() or name.endswith(("bias", "running_mean")):
        return tensor.zero_()
    if meta.dim() < 2:
        return tensor.fill_(1)
    fan_in = max(1, meta[0].numel())
    drawn = torch.empty(_PERIOD).uniform_(generator=torch.Generator().manual_seed(0))
    values = drawn.sub_(0.5).mul_(math.sqrt(12 / fan_in)).to(device, meta.dtype)
    flat = (
        torch.empty(meta.numel(), dtype=meta.dtype, device=device)
        if not tensor.is_contiguous()
        else tensor.view(-1)
    )
    for begin in range(0, flat.numel(), _PERIOD):
        part = flat[begin : begin + _PERIOD]
        part.copy_(values[: part.numel()])
    return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(meta.size()))
