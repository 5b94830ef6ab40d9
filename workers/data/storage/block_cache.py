"""The blocks of remote files on this node's disk, shared by all instances of one user (ADR-0048).

    limit      bytes that may be used, written by the node agent
    usage      bytes in use; its lock guards the number and every removal
    blocks/    a/ab12…: a block each; it appears there when it is complete
    fetching/  00 … ff: locks; who fetches a block holds that of its key's first byte
    readers/   what each reader needs next

Nothing in it is needed: without it, or when the disk fails, the same bytes come from the store. So no error
here ends anything; the first one of a kind is logged.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bus.logs import get_logger
from workers.data.storage.block_file import (
    DamagedBlock,
    file_bytes,
    packed,
    read_block,
    unpacked,
    whole_file,
)
from workers.data.storage.cache_plan import UNKNOWN, EvictionQueue, KeptBlock
from workers.data.storage.needs import PublishedNeeds
from workers.data.storage.neighbours import Neighbours

log = get_logger("data")

_USAGE = struct.Struct("<q")
_PARTIAL = "."

NextUses = Callable[[], dict[str, float]]
"""Key of each block that this process knows → seconds until it needs it; `UNKNOWN`: not in sight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCacheConfig:
    """How a process uses its node's cache."""

    free_bytes: int = 1 << 30
    """Bytes of the disk that stay free, for others than us."""
    renewed_part: float = 0.01
    """The part of all blocks after whose use the plan is made anew. Less follows the order more closely and
    costs more."""
    publish_s: float = 5.0
    """How often needs are published and those of others are read."""
    lock_wait_s: float = 1.0
    """How long one waits to write down what is kept. Whoever holds that lock for longer was frozen; then the
    block is not kept."""
    fetch_wait_s: float = 10.0
    """How long one waits for another process that fetches the same block, before it fetches it itself."""
    fetch_check_s: float = 0.005
    """How often it looks meanwhile."""
    abandoned_s: float = 600.0
    """After this a block that is being written counts as left by a process that was killed."""


@dataclass(slots=True)
class CacheCounts:
    """What a process did with its cache."""

    hits: int = 0
    kept: int = 0
    declined: int = 0
    evicted: int = 0
    damaged: int = 0
    from_neighbours: int = 0


class BlockCache:
    """One process's use of a folder of blocks; its methods may be called by several threads.

    Args:
        folder: The cache of this job's user on this node.
        name: Of this reader, for the others.
        config: Times and limits.
        limit_bytes: The limit, if no `limit` was written yet.
        clock: Seconds since 1970.
        neighbours: Other nodes' caches.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "reader",
        config: BlockCacheConfig = BlockCacheConfig(),
        *,
        limit_bytes: int = 0,
        clock: Callable[[], float] = time.time,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._folder = folder
        self._config = config
        self._neighbours = neighbours or Neighbours()
        self._clock = clock
        self._next_uses: NextUses = dict
        self._limit_bytes = limit_bytes
        self._needs = PublishedNeeds(folder / "readers", name)
        self._others: dict[str, float] = {}
        self._published_at = float("-inf")
        self._queue = EvictionQueue()
        self._queue_left = 0
        self._lock = threading.RLock()
        self._warned: set[str] = set()
        self._full_at: int | None = None
        self.counts = CacheCounts()

    def follow(self, next_uses: NextUses) -> None:
        """From now on what is kept goes by these uses; without any, what came first goes first."""
        self._next_uses = next_uses

    # --- reading --------------------------------------------------------------------------------------------
    def read(self, key: str, start: int, length: int, block_length: int) -> bytes | None:
        """A range of a block, checked; None if it is not here. A damaged block is removed."""
        path = self._path(key)
        try:
            data = read_block(path, key, start, length, block_length)
        except FileNotFoundError:
            return None
        except DamagedBlock:
            self.counts.damaged += 1
            self._warn("damaged", "a damaged block of cached data is fetched again", block=path)
            self._remove([key])
            return None
        except OSError as error:
            self._warn(
                "unreadable", "cached data can't be read", why=error.strerror, folder=str(self._folder)
            )
            return None
        self.counts.hits += 1
        return data

    def holds(self, key: str) -> bool:
        """Whether the block is here, perhaps damaged."""
        return os.path.exists(self._path(key))

    def has_room(self, block_length: int) -> bool:
        """Whether a block of that many bytes may stay without another one going."""
        usage = self._usage()
        return usage + file_bytes(block_length) <= self._limit(usage)

    @property
    def furthest(self) -> float:
        """Seconds until the block is needed that goes first; 0 if none is kept."""
        with self._lock:
            return self._queue.furthest

    @contextlib.contextmanager
    def fetching(self, key: str) -> Iterator[None]:
        """While one process of this node holds this, others wait with the same block. Look again inside."""
        try:
            (self._folder / "fetching").mkdir(parents=True, exist_ok=True)
            path = self._folder / "fetching" / key[:2]
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            yield
            return
        try:
            self._lock_file(file, self._config.fetch_wait_s)
            yield
        finally:
            os.close(file)

    def _lock_file(self, file: int, wait_s: float) -> bool:
        """Locks an open file until it is closed; False: somebody else has held it for that long."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(self._config.fetch_check_s)

    # --- other nodes ----------------------------------------------------------------------------------------
    def of_neighbour(self, key: str, block_length: int) -> bytes | None:
        """A block from another node's cache, checked; None: the store has to give it."""
        content = self._neighbours.ask(key, block_length)
        if content is None:
            return None
        try:
            data = unpacked(content, key, block_length)
        except DamagedBlock:
            self.counts.damaged += 1
            self._warn("lying", "another node's cache gave a damaged block: it comes from the store")
            self._neighbours.refuse(key)
            return None
        self.counts.from_neighbours += 1
        return data

    def file_of(self, key: str, block_length: int) -> bytes | None:
        """A block's file for another node, which checks it; None: it is not here."""
        try:
            return whole_file(self._path(key), block_length)
        except (OSError, DamagedBlock):
            return None

    def keys(self) -> list[str]:
        """The blocks that are here."""
        return [key for key, *_ in self._listed()]

    # --- keeping --------------------------------------------------------------------------------------------
    def keep(self, key: str, data: bytes, next_use: float = UNKNOWN) -> bool:
        """Keeps a block if the plan says so, and returns whether it did.

        Args:
            key: Its key.
            data: All of it.
            next_use: Seconds until this process needs it again, after the present use.
        """
        size = file_bytes(len(data))
        with self._lock, self._locked_usage() as usage:
            if usage is None or self.holds(key):
                return False
            self._plan(usage)
            limit = self._limit(usage[0])
            if usage[0] > limit:
                usage[0] -= self._unlink(self._queue.shrink(usage[0] - limit))
            wanted = min(next_use, self._others.get(key, UNKNOWN))
            placement = self._queue.place(size, wanted, limit - usage[0])
            if not placement.keep:
                self.counts.declined += 1
                return False
            usage[0] += size - self._unlink(placement.evict)
        if self._write(key, data):
            self.counts.kept += 1
            self._neighbours.kept(key)
            return True
        with self._locked_usage() as usage:
            if usage is not None:
                usage[0] -= size
        return False

    def _write(self, key: str, data: bytes) -> bool:
        path = Path(self._path(key))
        partial = path.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(partial, flags, 0o600), "wb", buffering=0) as output:
                for piece in (packed(key, data), data):
                    view = memoryview(piece)
                    while view:
                        view = view[output.write(view) :]
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            self._failed(error)
            return False
        return True

    def _failed(self, error: OSError) -> None:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._full_at = int(self._usage() * (1 - self._config.renewed_part))
            self._warn_full()
        else:
            self._warn("unwritable", "data can't be cached", why=error.strerror, folder=str(self._folder))

    def _limit(self, usage: int) -> int:
        """The bytes that may be used now: what the agent says, less what the disk has not."""
        try:
            limit = int((self._folder / "limit").read_text())
        except (OSError, ValueError):
            limit = self._limit_bytes
        if self._full_at is not None:
            limit = min(limit, self._full_at)
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._folder)
            spare = disk.f_bavail * disk.f_frsize - self._config.free_bytes
            if spare < 0:
                self._warn_full()
                limit = min(limit, max(0, usage + spare))
        return limit

    def _warn_full(self) -> None:
        text = "the disk of cached data is full: the cache stays smaller"
        self._warn("full", text, folder=str(self._folder))

    # --- the plan -------------------------------------------------------------------------------------------
    def _plan(self, usage: list[int]) -> None:
        """Makes the queue of evictions anew once enough blocks were placed by it; counts what is there."""
        if self._queue_left > 0:
            self._queue_left -= 1
            return
        now = self._clock()
        own = self._next_uses()
        self._exchange(own, now)
        kept: dict[str, KeptBlock] = {}
        for key, size, changed_at in self._listed():
            use = min(own.get(key, UNKNOWN), self._others.get(key, UNKNOWN))
            if use == UNKNOWN and key not in own and now - changed_at < 2 * self._config.publish_s:
                use = 0.0  # another reader has just fetched it, and not said yet what for
            kept[key] = KeptBlock(size, use, now - changed_at)
        usage[0] = sum(block.bytes for block in kept.values())
        self._queue = EvictionQueue.of(kept)
        self._queue_left = int(self._config.renewed_part * len(kept))

    def _exchange(self, own: dict[str, float], now: float) -> None:
        if now - self._published_at < self._config.publish_s:
            return
        self._published_at = now
        try:
            alone = not self._needs.has_others()
            soonest = [] if alone else sorted((use, key) for key, use in own.items() if use != UNKNOWN)
            self._needs.publish({key: use for use, key in soonest}, now)
            self._others = self._needs.of_others(now)
        except OSError as error:
            self._failed(error)

    def _listed(self) -> Iterator[tuple[str, int, float]]:
        """(key, bytes of the file, when it was written) of all blocks; removes what killed writers left."""
        for folder in sorted((self._folder / "blocks").glob("?")):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        if not entry.name.startswith(_PARTIAL):
                            yield entry.name, status.st_size, status.st_mtime
                        elif time.time() - status.st_mtime > self._config.abandoned_s:
                            os.unlink(entry.path)

    def _unlink(self, keys: tuple[str, ...]) -> int:
        """Removes blocks, and returns how many bytes that freed."""
        freed = 0
        for key in keys:
            with contextlib.suppress(OSError):
                size = os.stat(self._path(key)).st_size
                os.unlink(self._path(key))
                freed += size
        self.counts.evicted += len(keys)
        return freed

    def _remove(self, keys: list[str]) -> None:
        with self._lock, self._locked_usage() as usage:
            if usage is not None:
                usage[0] -= self._unlink(tuple(keys))

    # --- what is used ---------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _locked_usage(self) -> Iterator[list[int] | None]:
        """[bytes in use] under the folder's lock, written back after the block; None: it can't be had now."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(self._folder / "usage", flags, 0o600)
        except OSError as error:
            self._failed(error)
            yield None
            return
        try:
            if not self._lock_file(file, self._config.lock_wait_s):
                yield None
                return
            data = os.pread(file, _USAGE.size, 0)
            known = len(data) == _USAGE.size
            usage = [_USAGE.unpack(data)[0] if known else sum(size for _, size, _ in self._listed())]
            before = usage[0] if known else None
            yield usage
            if usage[0] != before:
                with contextlib.suppress(OSError):
                    os.pwrite(file, _USAGE.pack(usage[0]), 0)
        finally:
            os.close(file)

    def _usage(self) -> int:
        try:
            with open(self._folder / "usage", "rb") as file:
                return int(_USAGE.unpack(file.read(_USAGE.size))[0])
        except (OSError, struct.error):
            return 0

    def _path(self, key: str) -> str:
        return f"{self._folder}/blocks/{key[0]}/{key}"

    def _warn(self, kind: str, text: str, **more: object) -> None:
        """Logs an error of a kind once."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(text, **more)

    def close(self) -> None:
        """Withdraws this reader's needs. Idempotent."""
        with self._lock:  # which whoever publishes holds
            self._needs.close()
