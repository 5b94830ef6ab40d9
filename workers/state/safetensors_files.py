"""Safetensors files in an artifact store: written whole, read in part, checked before anything changes.

Writing, hashing and reading run in `request_progress.in_thread`, since gigabytes take longer than the
registry's lease.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bus.files.artifacts import Artifacts
from bus.wire.request_progress import in_thread
from schemas.errors import BadInput, BadModel, NotFound
from schemas.weights_digest import tensor_line

SUFFIX = ".safetensors"


def describe_tensor(tensor: Tensor) -> str:
    """`dtype shape sha256(bytes)` of a contiguous CPU tensor, little-endian as safetensors stores it."""
    content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # no Buffer to 3.11
    return tensor_line(
        str(tensor.dtype).removeprefix("torch."), tensor.shape, hashlib.sha256(content).hexdigest()
    )


async def put_tensors(
    artifacts: Artifacts, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]
) -> None:
    """Writes one safetensors file, which becomes visible when it is complete."""
    with tempfile.TemporaryDirectory(prefix="dmsc-weights-") as folder:
        path = Path(folder) / "shard"
        await in_thread(lambda: _write(path, tensors, metadata))
        await artifacts.put_file(name, path)


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata)


async def tensor_names(artifacts: Artifacts, name: str) -> list[str]:
    """The names of the tensors in a safetensors file, from its header alone."""
    start = await _read(artifacts, name, 0, 8)
    length = int.from_bytes(start, "little")
    try:
        header: dict[str, Any] = json.loads(await _read(artifacts, name, 8, length))
    except ValueError:
        raise BadInput(f"{artifacts.url}/{name} is not a safetensors file") from None
    return [key for key in header if key != "__metadata__"]


async def _read(artifacts: Artifacts, name: str, start: int, length: int) -> bytes:
    return b"".join([piece async for piece in artifacts.open_range(name, start, length)])


async def get_tensors(artifacts: Artifacts, name: str, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads some tensors of a safetensors file, on the CPU.

    Args:
        artifacts: The folder.
        name: The file in it.
        names: Names of tensors; those that the file lacks are left out.

    Raises:
        NotFound: There is no such file.
        BadInput: The file is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="dmsc-weights-") as folder:
        path = Path(folder) / "shard"
        await artifacts.get_file(name, path)
        return await in_thread(lambda: _load(path, f"{artifacts.url}/{name}", names))


def _load(path: Path, source: str, names: Iterable[str]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            return {key: file.get_tensor(key).clone() for key in names if key in present}
    except SafetensorError as error:
        raise BadInput(f"{source} is damaged: {error}") from None


@torch.no_grad()
def copy_into(own: Mapping[str, Tensor], loaded: Mapping[str, Tensor], source: str) -> None:
    """Checks all tensors, then copies them in place.

    Raises:
        BadModel: A shape or type differs; nothing was changed.
        NotFound: A tensor is missing; nothing was changed.
    """
    for name, target in own.items():
        tensor = loaded.get(name)
        if tensor is None:
            raise NotFound(f"{source} lacks {name}")
        if tensor.shape != target.shape or not _fits(tensor.dtype, target.dtype):
            raise BadModel(
                f"{source}: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                f"but the model has {target.dtype} {tuple(target.shape)}"
            )
    for name, target in own.items():
        target.copy_(loaded[name])


def _fits(dtype: torch.dtype, target: torch.dtype) -> bool:
    """Half-precision weights may start a run in full precision; integers must match."""
    return dtype == target or (dtype.is_floating_point and target.is_floating_point)
