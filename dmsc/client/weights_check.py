"""Checks the digests of downloaded weights and checkpoints, without torch.

A safetensors file consists of 8 bytes with the header's length (little endian), the header as JSON
(`name → dtype, shape, data_offsets`), and the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from schemas.checkpoint import CheckpointFile
from schemas.errors import BadData, DmscError
from schemas.job import WeightsManifest
from schemas.weights_digest import DTYPES, tensor_line, weights_sha256

_piece = 1 << 20


def check_file(path: Path, expected: CheckpointFile) -> None:
    """Raise `DmscError` if a checkpoint's file does not have the SHA-256 of its manifest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected.sha256:
        raise DmscError(f"{path}: its SHA-256 is not that of the manifest: it was damaged")


def check_weights(folder: Path, manifest: WeightsManifest) -> None:
    """Raise `DmscError` if the weights in `folder` do not have the manifest's digest."""
    lines: dict[str, str] = {}
    full = {written: name for name, written in manifest.names.items()}
    for shard in manifest.shards:
        if shard.endswith(".safetensors"):
            found = tensor_lines(folder / shard)
            lines |= {full.get(name, name): line for name, line in found.items()}
    digest = weights_sha256(lines)
    if digest != manifest.sha256:
        raise DmscError(
            f"{folder}: the weights' SHA-256 is {digest}, the job's is {manifest.sha256}:"
            " they were damaged on the way"
        )


def tensor_lines(path: Path) -> dict[str, str]:
    """Map each full parameter name of a safetensors file to `dtype shape sha256(bytes)`.

    Raises `BadData` if it is no safetensors file.
    """
    lines: dict[str, str] = {}
    with path.open("rb") as file:
        try:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
            for name, about in header.items():
                if name == "__metadata__":
                    continue
                begin, end = about["data_offsets"]
                file.seek(8 + size + begin)
                digest, left = hashlib.sha256(), end - begin
                while left > 0:
                    piece = file.read(min(left, _piece))
                    if not piece:
                        raise ValueError("it ends too early")
                    digest.update(piece)
                    left -= len(piece)
                dtype = DTYPES.get(about["dtype"], about["dtype"])
                lines[name] = tensor_line(dtype, about["shape"], digest.hexdigest())
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
            raise BadData(f"{path} is not a safetensors file: {error}") from error
    return lines
