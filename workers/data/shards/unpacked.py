"""Compressed shards, unpacked once: they have no ranges, so their content is kept in blocks instead."""

from __future__ import annotations

import bz2
import gzip
import io
import threading
from collections import OrderedDict

from schemas.errors import BadData
from workers.data.storage.block_file import block_key
from workers.data.storage.range_reader import RangeReader, Storage

KINDS = ("bz2", "gz", "zstd")


def unpack(data: bytes, kind: str, size: int, where: str) -> bytes:
    """The content of a compressed file, of which its index says that it has `size` bytes.

    Raises:
        BadData: it is damaged, of another size, or no library is here that unpacks it.
    """
    try:
        if kind == "gz":
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                content = file.read(size + 1)
        elif kind == "bz2":
            with bz2.BZ2File(io.BytesIO(data)) as file:
                content = file.read(size + 1)
        else:
            content = _unpack_zstd(data, size + 1, where)
    except (OSError, EOFError, ValueError) as error:
        raise BadData(f"{where} is damaged: {error}") from None
    if len(content) != size:
        more = "more than" if len(content) > size else f"{len(content):,}, not"
        raise BadData(f"{where} is damaged: it unpacks to {more} {size:,} bytes")
    return content


def _unpack_zstd(data: bytes, most: int, where: str) -> bytes:
    try:
        import pyarrow
    except ImportError:
        raise BadData(
            f"{where} is compressed by zstd; install pyarrow on every node: pip install 'dmsc[data]'"
        ) from None
    with pyarrow.input_stream(pyarrow.BufferReader(data), compression="zstd") as stream:
        return bytes(stream.read(most))


class UnpackedShards:
    """Content of shards in memory, the last used ones: at most `most_bytes`, but always one."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._content: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, shard: int) -> bytes | None:
        with self._lock:
            if shard in self._content:
                self._content.move_to_end(shard)
            return self._content.get(shard)

    def put(self, shard: int, content: bytes) -> None:
        with self._lock:
            self._content[shard] = content
            while len(self._content) > 1 and sum(map(len, self._content.values())) > self._most_bytes:
                self._content.popitem(last=False)


class UnpackedReader(RangeReader):
    """The content of one compressed file, by ranges.

    Args:
        storage: Where the file is; its cache keeps the content, not the file.
        packed: The file.
        kind: How it is compressed.
        size: Bytes of its content.
        tag: The shard.
        shards: What is kept in memory.
    """

    def __init__(
        self, storage: Storage, packed: RangeReader, kind: str, size: int, tag: int, shards: UnpackedShards
    ) -> None:
        super().__init__(storage, packed.name, packed.state, tag)
        self._packed, self._kind, self._content_bytes, self._shards = packed, kind, size, shards
        self._one_at_a_time = threading.Lock()

    @property
    def size(self) -> int:
        return self._content_bytes

    def key(self, number: int) -> str:
        if number not in self._keys:
            identity = f"{self._identity}\n{self._kind} unpacked to {self.size}"
            block_bytes = self._storage.config.block_bytes
            self._keys[number] = block_key(identity, self.state.mark, self.state.size, block_bytes, number)
        return self._keys[number]

    def read(self, start: int, length: int) -> bytes:
        end = min(start + length, self.size)
        if start >= end:
            return b""
        block_bytes = self._storage.config.block_bytes
        pieces = []
        for number in range(start // block_bytes, (end - 1) // block_bytes + 1):
            first = number * block_bytes
            inside = max(0, start - first)
            pieces.append(self._block_range(number, inside, min(end - first, block_bytes) - inside))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _block_range(self, number: int, inside: int, length: int) -> bytes:
        key, block_length = self.key(number), self.block_length(number)
        start = number * self._storage.config.block_bytes + inside
        content = self._shards.get(self._tag)
        if content is None:
            found = self._known(key, inside, length, block_length)
            if found is not None:
                return found
            content = self._unpack(key)
        return content[start : start + length]

    def _unpack(self, key: str) -> bytes:
        with self._one_at_a_time:
            content = self._shards.get(self._tag)
            if content is not None:
                return content
            cache = self.cache
            packed = self._packed.fetch_whole()
            content = unpack(packed, self._kind, self.size, self.described)
            self._shards.put(self._tag, content)
            if cache is not None:
                block_bytes = self._storage.config.block_bytes
                for number in range(self.blocks):
                    use = self._storage.use(self._tag, number, self.block_length(number))
                    data = content[number * block_bytes : (number + 1) * block_bytes]
                    if use is None:
                        cache.keep(self.key(number), data)
                    else:
                        cache.keep(self.key(number), data, use.next_use)
            return content
