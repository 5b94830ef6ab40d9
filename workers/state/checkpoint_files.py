"""One stage's tensors as a folder of torch.distributed.checkpoint (DCP), written and read by one process.

The index of such a folder is a pickle. A user who may name a checkpoint in a job need not be allowed to run
code on the nodes, so the unpickler accepts only the classes that an index consists of. DCP reads the tensors
with `torch.load(weights_only=True)`.

All functions block: call them off the event loop. Importing this module takes as long as importing torch, so
it is imported only to write or read a checkpoint (see `fork_server.PRELOAD_IN_QUIET`).
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from schemas.checkpoint import CheckpointFile
from schemas.errors import DamagedCheckpoint

INDEX = ".metadata"

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
"""DCP warns at each call; one process per stage is intended here."""

_INDEX_CLASSES = frozenset(
    {
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    }
)


def _member(kind: Any, name: Any) -> Any:
    """Stands for `getattr` in an index: Python 3.11.0 to 3.11.3 pickled enumeration members with it."""
    if kind is not _MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise pickle.UnpicklingError("builtins.getattr has no place in an index")
    return kind[name]


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in _INDEX_CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an index")


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with open(Path(self.path) / INDEX, "rb") as file:
            index = _Index(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError("it holds something else than an index")
        return index


def write_folder(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[CheckpointFile, ...]:
    """Writes `tensors` (on the CPU) as a DCP folder; returns its files with their digests."""
    writer = FileSystemWriter(folder, sync_files=False)  # only the copy in the artifact store is synced
    save(dict(tensors), storage_writer=writer, no_dist=True)
    return tuple(
        CheckpointFile(name=path.name, bytes=path.stat().st_size, sha256=file_sha256(path))
        for path in sorted(folder.iterdir())
    )


def read_folder(folder: Path, wanted: Callable[[str], bool], source: str) -> dict[str, Tensor]:
    """Those tensors of a DCP folder whose keys are `wanted`, on the CPU.

    Args:
        folder: The folder with all its files.
        wanted: Whether a tensor is read, by its key.
        source: The folder's name in messages.

    Raises:
        DamagedCheckpoint: The folder can't be read.
    """
    try:
        reader = _Reader(folder)
        entries = reader.read_metadata().state_dict_metadata
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and wanted(key)
        }
        load(tensors, storage_reader=reader, no_dist=True)
        return tensors
    except Exception as error:  # DCP raises pickle, zip, key and value errors, which all mean the same
        first = str(error).strip().split("\n")[0]
        raise DamagedCheckpoint(f"{source} can't be read: {type(error).__name__}: {first}") from error


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
