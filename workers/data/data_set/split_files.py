"""The shards of one split, by ranges: nothing of them is used before it was compared with its digest."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from schemas.data_set.units import StoredObject
from schemas.errors import BadData, DmscError, Unavailable
from schemas.job_file.data_set_use import DataSetUse
from workers.data.data_set.fetching import OBJECTS, is_fetched, key_of, read_manifest
from workers.data.data_set.shard_file import BLOCK_BYTES, ShardIndex
from workers.data.storage.node_cache import open_storage
from workers.data.storage.range_reader import RangeReader, Storage
from workers.data.storage.sources import LocalSource


class SplitFiles:
    """Shards and indices of one split.

    Args:
        use: The version, and which of its splits.
        fetched: What was fetched for it: `fetch_data_sets`.
        at: The source's key in the job file, for error texts.

    Attributes:
        manifest: The version's.
        shards: The split's.

    Raises:
        BadData: There is no such split, or its files can't be opened.
    """

    def __init__(self, use: DataSetUse, fetched: Mapping[str, Path], at: str) -> None:
        self._what = f"{at}.source dataset://{use.name}@{use.version}"
        self.manifest = read_manifest(fetched, use, at)
        if use.split not in self.manifest.splits:
            raise BadData(
                f"{self._what} has no split {use.split}; it has {', '.join(self.manifest.splits) or 'none'}"
            )
        self.shards = self.manifest.splits[use.split]
        self.split = use.split
        self._own: Path | None = None
        if is_fetched(use.store):
            self._own = (fetched[key_of(use)] / OBJECTS).resolve()
            self.storage = Storage(LocalSource(str(self._own), own=True))
        else:
            self.storage = open_storage(use.store)
        self._readers: dict[int, RangeReader] = {}
        self._indices: dict[int, ShardIndex] = {}
        self._checked: dict[int, bytearray] = {}

    def name(self, shard: int) -> str:
        """The shard, for people."""
        manifest = self.manifest
        return f"dataset://{manifest.name}@{manifest.version}/{self.split}-{shard:05}"

    def reader(self, shard: int) -> RangeReader:
        """The shard's file, opened once. Whoever reads here compares nothing: `read` does.

        Raises:
            BadData: It is missing, or has another size.
            Unavailable: It has, and is fetched again.
        """
        if shard not in self._readers:
            self._readers[shard] = self._open(self.shards[shard], shard)
        return self._readers[shard]

    def _open(self, stored: StoredObject, tag: int = 0) -> RangeReader:
        try:
            reader = self.storage.open(stored.name, tag=tag)
        except BadData as error:
            raise BadData(f"{self._what}: {error.text}; build it again, or give its files back") from None
        if reader.size != stored.bytes:
            reason = f"it has {reader.size:,} bytes, and the manifest says {stored.bytes:,}"
            raise self._changed(stored, reason)
        return reader

    def _changed(self, stored: StoredObject, reason: str) -> DmscError:
        """What is raised of a file that is not the one that was built.

        What was fetched was whole when it came: it is removed, and whoever comes next fetches it again.
        """
        if self._own is None:
            return BadData(f"{self._what}: {stored.name} was changed: {reason}; nothing of it is used")
        with contextlib.suppress(OSError):
            (self._own / stored.name).unlink()
        return Unavailable(
            f"{self._what}: {stored.name} was damaged on this node: {reason}; it is fetched again"
        )

    def index(self, shard: int) -> ShardIndex:
        """The shard's index.

        Raises:
            BadData: It is missing, or not the one that was built.
        """
        if shard not in self._indices:
            stored = self.shards[shard].index
            content = self._open(stored).fetch_whole()
            if hashlib.sha256(content).hexdigest() != stored.sha256:
                raise self._changed(stored, "it does not hold what was built")
            self._indices[shard] = ShardIndex.read(content, f"{self._what}: {stored.name}")
        return self._indices[shard]

    def read(self, shard: int, start: int, length: int) -> bytes:
        """`length` bytes of a shard from `start`, or fewer at its end. Any thread may call it.

        Raises:
            BadData: It does not hold what was built.
            Unavailable: The same, of a file that is fetched again; or the store does not answer.
        """
        reader, index = self.reader(shard), self.index(shard)
        checked = self._checked.setdefault(shard, bytearray(len(index.blocks)))
        stop = min(start + length, reader.size)
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            if not checked[block]:
                content = reader.read(block * BLOCK_BYTES, BLOCK_BYTES)
                if not index.matches(block, content):
                    where = (
                        f"{self.name(shard)} does not hold what was built, at byte {block * BLOCK_BYTES:,}"
                    )
                    raise self._changed(self.shards[shard], where)
                checked[block] = 1
        return reader.read(start, length)

    def file(self, shard: int) -> BinaryIO:
        """The shard as a file that can be read and sought. Reading raises as `read` does."""
        return cast(BinaryIO, io.BufferedReader(_CheckedFile(self, shard), buffer_size=BLOCK_BYTES))

    def close(self) -> None:
        """Frees connections. Idempotent."""
        self.storage.close()


class _CheckedFile(io.RawIOBase):
    def __init__(self, files: SplitFiles, shard: int) -> None:
        self._files, self._shard = files, shard
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        size = self._files.shards[self._shard].bytes
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: size}[whence]
        if base + offset < 0:
            raise ValueError(f"no position {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._files.read(self._shard, self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
