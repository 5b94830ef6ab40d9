"""The digest of trained weights, and the index of their shards. Pure: the orchestrator has no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

INDEX_NAME = "model.safetensors.index.json"
"""The file name at which Hugging Face's loaders look for the index."""


def tensor_line(dtype: str, shape: Sequence[int], content_sha256: str) -> str:
    """`dtype shape sha256`, the values of `Exported.tensors`: `float32 [256,192] 9f86d0…`."""
    return f"{dtype} [{','.join(map(str, shape))}] {content_sha256}"


def weights_sha256(tensors: Mapping[str, str]) -> str:
    """SHA-256 over the sorted lines `name dtype shape sha256(bytes)` of all tensors.

    It depends neither on the segmentation nor on the file layout, so it can test any two runs for equality.

    Args:
        tensors: full parameter name → `tensor_line`, of all stages together.
    """
    lines = "".join(f"{name} {tensors[name]}\n" for name in sorted(tensors))
    return hashlib.sha256(lines.encode()).hexdigest()


def weights_index(shard_of: Mapping[str, str], total_bytes: int) -> dict[str, Any]:
    """The content of `model.safetensors.index.json`: full parameter name → shard file."""
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(shard_of.items()))}
