"""Safetensors files in an artifact store: written whole, read by their headers.

Writing, hashing and reading run in `request_progress.in_thread`, since gigabytes take longer than the
registry's lease.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bus.files.artifacts import Artifacts, ReadableArtifacts
from bus.wire.request_progress import in_thread
from schemas.errors import BadInput
from schemas.weights_digest import tensor_line

SUFFIX = ".safetensors"
MOST_HEADER_BYTES = 100_000_000
"""Longest header that the format allows."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


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


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file: the bytes `start` … `end`-1 of the file `shard`, row by row."""

    shard: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


async def read_header(artifacts: ReadableArtifacts, shard: str) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, from its header alone.

    Raises:
        NotFound: There is no such file.
        BadInput: It is no safetensors file, or of a type that torch lacks.
    """
    source = f"{artifacts.url}/{shard}"
    length = int.from_bytes(await _read(artifacts, shard, 0, 8), "little")
    if not 0 < length <= MOST_HEADER_BYTES:
        raise BadInput(f"{source} is not a safetensors file")
    try:
        header: dict[str, Any] = json.loads(await _read(artifacts, shard, 8, length))
        return {
            name: _stored(shard, name, entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{source} is not a safetensors file: {error}") from None


def _stored(shard: str, name: str, entry: Any, base: int) -> StoredTensor:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    first, last = entry["data_offsets"]
    if first < 0 or last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} has {last - first} bytes for {entry['dtype']} {list(shape)}")
    return StoredTensor(shard, name, dtype, shape, base + first, base + last)


async def _read(artifacts: ReadableArtifacts, name: str, start: int, length: int) -> bytes:
    return b"".join([piece async for piece in artifacts.open_range(name, start, length)])


def fits(dtype: torch.dtype, target: torch.dtype) -> bool:
    """Half-precision weights may start a run in full precision; integers must match."""
    return dtype == target or (dtype.is_floating_point and target.is_floating_point)
