"""Trained weights: their manifest, their digest, the index of their shards. Pure: entities have no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from schemas.base import Part
from schemas.marks import Url

INDEX_NAME = "model.safetensors.index.json"
"""The file name at which Hugging Face's loaders look for the index."""

DIGESTS = "tensor_sha256"
"""The index's part that tells what each tensor's bytes are."""

BESIDE = frozenset(
    {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    | {"special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"}
    | {"added_tokens.json", "chat_template.jinja", "preprocessor_config.json"}
)
"""Files that may lie beside the shards: what Hugging Face's loaders look for. No others are served."""

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of dtypes: safetensors → torch."""


class WeightsManifest(Part):
    """The trained weights: safetensors shards with an index in the Hugging Face layout.

    `sha256` is over the sorted lines `name dtype shape sha256(bytes)` of all tensors, so that it
    depends neither on the segmentation nor on the file layout.
    """

    url: Url
    shards: tuple[str, ...] = Field(description="safetensors, their index, and the files beside them")
    tensors: dict[str, str] = Field(description="full parameter name → shard file")
    names: dict[str, str] = Field({}, description="full parameter name → name in the shard, if it is another")
    bytes: int
    sha256: str
    step: int


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


def weights_index(
    shard_of: Mapping[str, str],
    total_bytes: int,
    names: Mapping[str, str] = {},
    tensors: Mapping[str, str] = {},
) -> dict[str, Any]:
    """The content of `model.safetensors.index.json`: a tensor's name in its shard → shard file.

    Args:
        shard_of: Full parameter name → shard file.
        total_bytes: Of all tensors.
        names: Full parameter name → name in the shard, where it is another.
        tensors: Full parameter name → `tensor_line`. So who reads some tensors can tell whether they are
            whole, and by all lines together whether the index is; others' loaders pass over it.
    """
    where = {names.get(name, name): shard for name, shard in shard_of.items()}
    metadata: dict[str, Any] = {"total_size": total_bytes}
    if tensors:
        metadata[DIGESTS] = {names.get(name, name): f"{name} {tensors[name]}" for name in sorted(tensors)}
    return {"metadata": metadata, "weight_map": dict(sorted(where.items()))}


def indexed_tensors(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name in the shard → (full parameter name, `tensor_line`), as an index has them; empty: it has none."""
    metadata = index.get("metadata")
    lines = metadata.get(DIGESTS) if isinstance(metadata, Mapping) else None
    if not isinstance(lines, Mapping):
        return {}
    found: dict[str, tuple[str, str]] = {}
    for stored, line in lines.items():
        name, _, told = str(line).partition(" ")
        found[str(stored)] = name, told
    return found
