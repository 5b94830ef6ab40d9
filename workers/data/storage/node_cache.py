"""This process's part of its node's cache, as the node agent granted it; and storages that use it."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

from workers.data.storage.block_cache import BlockCache
from workers.data.storage.neighbours import Neighbours
from workers.data.storage.range_reader import MemoryBlocks, Storage, StorageConfig, StorageCounts
from workers.data.storage.retrying import retried
from workers.data.storage.source_kinds import open_source, source_on

_memory = MemoryBlocks(64 << 20)
"""Of all single files together: a source of another kind may have thousands open."""
counts = StorageCounts()
"""What this process has read of stores so far."""
_granted: list[tuple[Path, str]] = []
neighbours = Neighbours()
"""The caches of other nodes, for all caches of this process, once an instance connects it."""
_cache_of_files: list[BlockCache] = []
"""Theirs, too: each cache looks through the whole folder before it keeps its first block."""


def grant(folder: str | Path | None, reader: str) -> None:
    """From now on this process keeps blocks in `folder`, under the name `reader`; None: it keeps none."""
    _granted[:] = [] if folder is None else [(Path(folder), reader)]
    _cache_of_files[:] = [BlockCache(*granted, neighbours=neighbours) for granted in _granted]


def shared_folder() -> Path | None:
    """The folder that this process shares with others of its user and node; None: it has none."""
    return _granted[0][0] if _granted else None


def _cache() -> BlockCache | None:
    neighbours.wanted = True
    return BlockCache(*_granted[0], neighbours=neighbours) if _granted else None


def shared_cache() -> BlockCache | None:
    """This process's use of the node's cache, for other nodes; None: it has none, or reads from no store."""
    return _cache_of_files[0] if _cache_of_files and neighbours.wanted else None


def open_file(filesystem: Any, path: str) -> io.BufferedReader:
    """A remote file of a file system of fsspec, to read at any place, by ranges and with this node's cache.

    Raises:
        BadData: it is missing or forbidden. Reading raises it, too, if the file has changed.
        Unavailable: the store does not answer.
    """
    source = retried(lambda: source_on(filesystem, path), path, StorageConfig().first_retries)
    neighbours.wanted = True
    storage = Storage(source, _cache_of_files[0] if _cache_of_files else None, memory=_memory, total=counts)
    try:
        return storage.open().as_file(closing=partial(storage.close, log_counts=False))
    except BaseException:
        storage.close()
        raise


def open_storage(url: str) -> Storage:
    """The files below a URL, with this node's cache.

    Raises:
        BadData: no such scheme or place, its driver is missing, or the URL is forbidden.
        Unavailable: the store does not answer.
    """
    source = retried(lambda: open_source(url), url, StorageConfig().first_retries)
    return Storage(source, _cache() if source.cached else None, total=counts)
