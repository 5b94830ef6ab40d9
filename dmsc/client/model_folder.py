"""A folder of safetensors on this machine: its files that make a version, and its weights' digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dmsc.client.weights_check import tensor_lines
from schemas.errors import BadData, BadInput
from schemas.models.version import ModelFile
from schemas.weights_digest import BESIDE, INDEX_NAME, weights_sha256

SHARD = ".safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class WeightsFolder:
    """A folder that may be registered: the names of its files, and the digest of its weights."""

    path: Path
    files: tuple[str, ...]
    sha256: str


def read_folder(path: Path) -> WeightsFolder:
    """Read a folder as Hugging Face saves a model.

    Raises:
        BadInput: There is no such folder, or it holds no safetensors.
        BadData: A file is damaged, or the index names a shard that is not there.
    """
    if not path.is_dir():
        raise BadInput(f"{path}: no such folder; name one with safetensors")
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    shards = _shards(path, names)
    lines: dict[str, str] = {}
    for shard in shards:
        found = tensor_lines(path / shard)
        if twice := lines.keys() & found.keys():
            raise BadData(f"{path / shard}: {min(twice)} is in another shard, too")
        lines |= found
    if not lines:
        raise BadInput(f"{path}: its safetensors hold no tensor")
    beside = [name for name in names if name in BESIDE or name == INDEX_NAME]
    return WeightsFolder(path, (*shards, *beside), weights_sha256(lines))


def _shards(path: Path, names: Sequence[str]) -> list[str]:
    """The shards that count: those of the index where there is one, else all."""
    shards = [name for name in names if name.endswith(SHARD)]
    if INDEX_NAME in names:
        try:
            indexed = set(json.loads((path / INDEX_NAME).read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadData(f"{path / INDEX_NAME}: no index of safetensors") from None
        if missing := sorted(indexed - set(shards)):
            raise BadData(f"{path / INDEX_NAME} names {missing[0]}, which is not there")
        return sorted(indexed)
    if not shards:
        pickled = next((name for name in names if name.endswith(PICKLES)), None)
        if pickled is not None:
            raise BadInput(
                f"{path}: {pickled} is a pickle, which runs code when it is opened; save the model with "
                "safe_serialization=True"
            )
        raise BadInput(f"{path}: no safetensors in it")
    return shards


def check_files(folder: Path, files: Sequence[ModelFile]) -> None:
    """Raise `BadData` if a file in the folder is not the one that its version names."""
    for file in files:
        with (folder / file.name).open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != file.sha256:
            raise BadData(
                f"{folder / file.name}: its SHA-256 is {digest[:12]}, the version's {file.sha256[:12]}"
            )
