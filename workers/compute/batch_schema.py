"""What travels of a batch: names, shapes and types, as the analysis found them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from schemas.registry import TensorSchema
from workers.compute.model import TOKENS


def batch_schema(batch: Mapping[str, Tensor], names: Sequence[str]) -> tuple[TensorSchema, ...]:
    """The schema of these tensors of a batch."""
    return tuple(
        TensorSchema(
            name=name, shape=tuple(batch[name].shape[1:]), dtype=str(batch[name].dtype).removeprefix("torch.")
        )
        for name in names
    )


def empty_batch(schema: Sequence[TensorSchema], samples: int = 2) -> dict[str, Tensor]:
    """A batch of this schema without data, on `meta`; without a schema: tokens and targets."""
    if not schema:
        return dict(TOKENS)
    return {
        tensor.name: torch.empty((samples, *tensor.shape), dtype=getattr(torch, tensor.dtype), device="meta")
        for tensor in schema
    }
