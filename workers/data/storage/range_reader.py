"""Ranges of one file, from memory, the node's cache or the store: always of the state it was opened in."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, get_args

from bus.logs import get_logger
from schemas.telemetry import Tier
from workers.data.storage.block_cache import BlockCache, CacheCounts
from workers.data.storage.block_file import block_key
from workers.data.storage.cache_plan import UNKNOWN, worth_whole
from workers.data.storage.retrying import StoreRetryTimes, retried
from workers.data.storage.sources import FilePart, FileSource, FileState, LocalSource

log = get_logger("data")

T = TypeVar("T")

_LOGGED = ("kept", "declined", "evicted", "damaged", "from_neighbours")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """How files are read."""

    block_bytes: int = 4 << 20
    """What is fetched and kept at once. Larger: fewer requests; smaller: less that is fetched in vain."""
    memory_bytes: int = 64 << 20
    """Blocks in memory that were not kept on disk, of all files of one storage."""
    retries: StoreRetryTimes = field(default_factory=StoreRetryTimes)
    first_retries: StoreRetryTimes = field(default_factory=lambda: StoreRetryTimes(give_up_s=20.0))
    """The same until the store has answered once: its name may be wrong, and whoever wrote it is waiting."""


@dataclass(frozen=True, slots=True)
class BlockUse:
    """What the order says of a block: seconds until it is needed again, after now.

    `useful` gives the bytes of it that are needed within some seconds, the present range included.
    """

    next_use: float = UNKNOWN
    useful: Callable[[float], float] = field(default=lambda within_s: 0.0)


class StorageCounts:
    """What was read of stores: requests to them, and bytes by where they came from. Threads may count."""

    def __init__(self) -> None:
        self.requests = 0
        self._bytes: dict[Tier, int] = dict.fromkeys(get_args(Tier), 0)
        self._lock = threading.Lock()

    def add(self, tier: Tier, length: int, *, requests: int = 0) -> None:
        with self._lock:
            self._bytes[tier] += length
            self.requests += requests

    @property
    def bytes(self) -> dict[Tier, int]:
        """By tier, those of tiers that gave some."""
        with self._lock:
            return {tier: count for tier, count in self._bytes.items() if count}

    @property
    def fetched_bytes(self) -> int:
        """From the store itself."""
        return self._bytes["store"]


class MemoryBlocks:
    """Blocks in memory, the last used ones, at most `most_bytes` of them."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._blocks: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return self._bytes

    def get(self, key: str) -> bytes | None:
        with self._lock:
            data = self._blocks.get(key)
            if data is not None:
                self._blocks.move_to_end(key)
            return data

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            if len(data) > self._most_bytes or key in self._blocks:
                return
            self._blocks[key] = data
            self._bytes += len(data)
            while self._bytes > self._most_bytes:
                _, gone = self._blocks.popitem(last=False)
                self._bytes -= len(gone)


class Storage:
    """The files below one URL, and what they share: cache, memory, limits. Threads may share it, too.

    Args:
        source: Where the files come from.
        cache: The node's cache; None: every range comes from the store.
        config: Sizes and limits.
        memory: Blocks in memory, if other storages share them.
        total: Counts of all storages of this process, if it wants them.
    """

    def __init__(
        self,
        source: FileSource,
        cache: BlockCache | None = None,
        config: StorageConfig = StorageConfig(),
        memory: MemoryBlocks | None = None,
        total: StorageCounts | None = None,
    ) -> None:
        self.source = source
        self.cache = cache if source.cached else None
        self.config = config
        self.memory = memory or MemoryBlocks(config.memory_bytes)
        self.counts = StorageCounts()
        self._total = total
        self._has_answered = False
        self._closed = False
        self.use_of: Callable[[int, int, int], BlockUse] | None = None
        """(tag of a file, number of a block, its bytes) → what the order says of it, if there is one."""

    def open(self, name: str = "", tag: int = 0) -> RangeReader:
        """Opens a file and pins its state. `tag` is what `use_of` knows the file by.

        Raises:
            BadData: it is missing or forbidden.
            Unavailable: the store does not answer.
        """
        state = self.retried(lambda: self.source.state(name), self.source.described(name))
        return RangeReader(self, name, state, tag)

    def count(self, tier: Tier, length: int, *, requests: int = 0) -> None:
        """So many bytes came from there."""
        self.counts.add(tier, length, requests=requests)
        if self._total is not None:
            self._total.add(tier, length, requests=requests)

    def use(self, tag: int, number: int, length: int) -> BlockUse | None:
        """What the order says of a block; None: there is no order."""
        return None if self.use_of is None else self.use_of(tag, number, length)

    def names(self) -> list[str]:
        """The files below the URL. Raises as `open` does."""
        return self.retried(self.source.names, self.source.described(""))

    def retried(self, call: Callable[[], T], what: str) -> T:
        """The result of a call to the store, which is repeated as long as its errors pass.

        Raises as `open` does.
        """
        times = self.config.retries if self._has_answered else self.config.first_retries
        result = retried(call, what, times)
        self._has_answered = True
        return result

    def close(self, *, log_counts: bool = True) -> None:
        """Frees connections, and withdraws what was published to other readers. Idempotent."""
        self.source.close()
        if self.cache is not None:
            self.cache.close()
        if log_counts and self.counts.requests and not self._closed:
            kept = self.cache.counts if self.cache is not None else CacheCounts()
            log.info(
                "data read from a store",
                source=self.source.described(""),
                requests=self.counts.requests,
                fetched_bytes=self.counts.fetched_bytes,
                from_cache=kept.hits,
                **{f"{tier}_bytes": count for tier, count in self.counts.bytes.items() if tier != "store"},
                **{name: getattr(kept, name) for name in _LOGGED},
            )
        self._closed = True


class RangeReader:
    """Ranges of one file in the state in which it was opened. Any number of threads may read."""

    def __init__(self, storage: Storage, name: str, state: FileState, tag: int = 0) -> None:
        self._storage = storage
        self._tag = tag
        self.name = name
        self.state = state
        self._identity = storage.source.identity(name)
        self._keys: dict[int, str] = {}

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.state.size

    @property
    def described(self) -> str:
        return self._storage.source.described(self.name)

    @property
    def cache(self) -> BlockCache | None:
        """Where its blocks are kept; None: nowhere, as those of a file whose state has no mark."""
        return self._storage.cache if self.state.mark else None

    @property
    def blocks(self) -> int:
        """Number of its blocks."""
        return -(-self.size // self._storage.config.block_bytes)

    def block_length(self, number: int) -> int:
        """Bytes of a block: all but the last have the same."""
        block_bytes = self._storage.config.block_bytes
        return min(block_bytes, self.size - number * block_bytes)

    def key(self, number: int) -> str:
        """The key of a block of this state of the file."""
        if number not in self._keys:
            block_bytes = self._storage.config.block_bytes
            self._keys[number] = block_key(self._identity, self.state.mark, self.size, block_bytes, number)
        return self._keys[number]

    def read(self, start: int, length: int) -> bytes:
        """`length` bytes from `start`, or fewer at the end of the file.

        Raises:
            BadData: it is no longer there. `SourceChanged`: it is not what was opened.
            Unavailable: the store does not answer.
        """
        end = min(start + length, self.size)
        if start >= end:
            return b""
        if not self._storage.source.cached:
            try:
                return self._storage.source.read(self.name, start, end - start, self.state)
            except OSError:
                return self._fetch(start, end - start)
        block_bytes = self._storage.config.block_bytes
        pieces = []
        for number in range(start // block_bytes, (end - 1) // block_bytes + 1):
            first = number * block_bytes
            inside = max(0, start - first)
            pieces.append(self._block_range(number, inside, min(end - first, block_bytes) - inside))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, parts: Sequence[FilePart], length: int) -> bool:
        """Reads ranges of a local file, each of that length, to where they are wanted; False: `read` has to.

        Raises `SourceChanged`.
        """
        source = self._storage.source
        if not isinstance(source, LocalSource):
            return False
        try:
            source.read_into(self.name, parts, length, self.state)
        except OSError:
            return False  # `read` asks again as long as it may pass
        return True

    def _block_range(self, number: int, inside: int, length: int) -> bytes:
        key, block_length = self.key(number), self.block_length(number)
        found = self._known(key, inside, length, block_length)
        if found is not None:
            return found
        cache = self.cache
        use = self._storage.use(self._tag, number, block_length)
        room = cache is not None and cache.has_room(block_length)
        useful = length if use is None else max(length, use.useful(cache.furthest if cache else 0.0))
        if use is not None and not worth_whole(useful, block_length, room=room):
            return self._fetch(number * self._storage.config.block_bytes + inside, length)
        if cache is None:
            data = self._fetch_block(number, key)
        else:
            with cache.fetching(key):
                found = self._known(key, inside, length, block_length)
                if found is not None:
                    return found
                data = self._of_neighbour(cache, key, block_length) or self._fetch_block(number, key)
                if not cache.keep(key, data, UNKNOWN if use is None else use.next_use):
                    self._storage.memory.put(key, data)
        return data[inside : inside + length]

    def _known(self, key: str, inside: int, length: int, block_length: int) -> bytes | None:
        if (data := self._storage.memory.get(key)) is not None:
            self._storage.count("memory", length)
            return data[inside : inside + length]
        cache = self.cache
        data = None if cache is None else cache.read(key, inside, length, block_length)
        if data is not None:
            self._storage.count("disk", length)
        return data

    def _of_neighbour(self, cache: BlockCache, key: str, block_length: int) -> bytes | None:
        data = cache.of_neighbour(key, block_length)
        if data is not None:
            self._storage.count("neighbour", block_length)
        return data

    def _fetch_block(self, number: int, key: str) -> bytes:
        data = self._fetch(number * self._storage.config.block_bytes, self.block_length(number))
        if self.cache is None:
            self._storage.memory.put(key, data)
        return data

    def _fetch(self, start: int, length: int) -> bytes:
        source = self._storage.source
        data = self._storage.retried(
            lambda: source.read(self.name, start, length, self.state), self.described
        )
        self._storage.count("store", len(data), requests=1)
        return data

    def content_mark(self, edge: int) -> str:
        """What tells its content from another's, on every node: a local file's ends, of so many bytes each,
        else the store's mark.

        Raises as `read` does.
        """
        if self._storage.source.cached:
            return self.state.mark
        last = max(edge, self.size - edge)
        return hashlib.sha256(self.read(0, edge) + self.read(last, edge)).hexdigest()

    def fetch_whole(self) -> bytes:
        """All of it at once, past the cache: for what is kept in another form."""
        return self._fetch(0, self.state.size) if self.state.size else b""

    def as_file(self, *, closing: Callable[[], None] | None = None) -> io.BufferedReader:
        """The file for libraries that want one: it can be read and sought; `closing` is called at its end."""
        return io.BufferedReader(_SeekableRanges(self, closing), buffer_size=64 << 10)


class _SeekableRanges(io.RawIOBase):
    def __init__(self, reader: RangeReader, closing: Callable[[], None] | None) -> None:
        self._reader = reader
        self._closing = closing
        self._position = 0

    def close(self) -> None:
        if not self.closed and self._closing is not None:
            self._closing()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size}[whence]
        if base + offset < 0:
            raise ValueError(f"no position {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what io passes
        data = self._reader.read(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
