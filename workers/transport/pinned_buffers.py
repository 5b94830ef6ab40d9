"""Pinned host buffers: gloo sends host memory only, so GPU tensors pass through them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from schemas.data_plane import TensorMeta
from schemas.errors import BadMessage
from workers.transport.gloo import in_thread


def describe(tensors: Sequence[Tensor]) -> tuple[TensorMeta, ...]:
    """The shapes and dtypes of tensors, as a notice names them."""
    return tuple(_meta(tensor.shape, tensor.dtype) for tensor in tensors)


@functools.lru_cache(maxsize=256)
def _meta(shape: torch.Size, dtype: torch.dtype) -> TensorMeta:
    """Kept, since most transfers have the shapes of the one before."""
    return TensorMeta(shape=tuple(shape), dtype=str(dtype).removeprefix("torch."))


def size_bytes(metas: Sequence[TensorMeta]) -> int:
    """Bytes of the described tensors on the wire."""
    total = 0
    for meta in metas:
        count = 1
        for extent in meta.shape:
            count *= extent
        total += count * dtype_of(meta).itemsize
    return total


def dtype_of(meta: TensorMeta) -> torch.dtype:
    """The dtype that a notice names.

    Raises:
        BadMessage: This version of torch has no such dtype.
    """
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise BadMessage(f"a notice offers a tensor of unknown dtype {meta.dtype!r}", dtype=meta.dtype)
    return dtype


class HostCopy:
    """Tensors that are being copied to host memory, so that waiting for a send holds no device memory.

    Host tensors are kept as they are and must not be changed any more. Create it on the event loop.
    """

    def __init__(self, tensors: Sequence[Tensor], learning_rate: float | None = None) -> None:
        self.learning_rate = learning_rate
        """Of the step whose gradients they are."""
        self._tensors: Sequence[Tensor] = tensors
        self._copying: asyncio.Task[Sequence[Tensor]] | None = None
        if any(tensor.device.type != "cpu" for tensor in tensors):
            self._copying = asyncio.create_task(in_thread("to-host", lambda: to_host(tensors)))
            self._tensors = ()

    async def there(self) -> Sequence[Tensor]:
        """The tensors, once they are on the host."""
        if self._copying is None:
            return self._tensors
        return await asyncio.shield(self._copying)


def to_host(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Contiguous host tensors with the same values, detached.

    Host tensors are copied only if they are not contiguous. GPU tensors go into pinned memory; that blocks
    until they have arrived, so do not call it on the event loop.
    """
    host_tensors: list[Tensor] = []
    devices: set[torch.device] = set()
    for tensor in tensors:
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            host_tensors.append(tensor.contiguous())
            continue
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        devices.add(tensor.device)
        host_tensors.append(host)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return tuple(host_tensors)


def landing(metas: Sequence[TensorMeta], device: torch.device) -> list[Tensor]:
    """New host tensors to receive into; pinned if their target is a GPU."""
    pinned = device.type == "cuda"
    return [torch.empty(meta.shape, dtype=dtype_of(meta), pin_memory=pinned) for meta in metas]


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The received tensors on `device`; complete on return."""
    if device.type == "cpu":
        return list(tensors)
    moved = [tensor.to(device, non_blocking=True) for tensor in tensors]
    torch.cuda.current_stream(device).synchronize()
    return moved
