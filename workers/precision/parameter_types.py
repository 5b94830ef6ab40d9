"""A model in the type that its job says (`model.dtype`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from workers.build.model_tensors import modules_of

TRAINABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Types of trained parameters: those that an fp32 master holds exactly."""


def named_dtype(name: str | None) -> torch.dtype | None:
    """The type of this name, such as `bfloat16`; None: as the factory makes it."""
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found


def convert(model: Any, dtype: torch.dtype) -> None:
    """Gives a model's floating-point parameters and saved buffers this type, in place.

    Shared ones stay shared. What keeps running statistics stays as it is, since small steps would be lost in
    half precision, and so do buffers that are no part of the weights, such as tables of angles.
    """
    places: dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]] = {}
    for _, module in modules_of(model):
        if isinstance(module, _NormBase) and module.track_running_stats:
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_floating_point() or tensor.dtype == dtype:
                continue
            if name not in module._non_persistent_buffers_set:
                places.setdefault(id(tensor), (tensor, []))[1].append((module, name))
    module, tensor = None, None  # type: ignore[assignment]  # so that each is freed once it is replaced
    while places:
        tensor, owners = places.pop(next(iter(places)))
        own = tensor.detach().to(dtype)
        if isinstance(tensor, nn.Parameter):
            own = nn.Parameter(own, tensor.requires_grad)
        for module, name in owners:
            setattr(module, name, own)


def converted(batch: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """What a model of this type takes of a batch: floating-point tensors in it, others as they are."""
    if dtype is None:
        return dict(batch)
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()
    }
