"""The node's cache of remote data: who gets which part of it, and what goes when it is too much (ADR-0048).

The folder `<root>/<owner>/` holds blocks of files that jobs of one owner read; only their processes may read
and write there, so that nobody gets another one's data, or other bytes under its name. Within the part that
this agent grants, those processes evict by the order of their samples. The agent holds them to it, and
removes what is in nobody's part.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bus.files.removal import remove_folder
from bus.logs import get_logger
from entities.cluster.store_folders import write_for_instance

log = get_logger("cluster")

LIMIT = "limit"
"""The file in an owner's folder with the bytes that it may have."""
_OURS = frozenset({LIMIT, "usage"})
DEEPEST = 16
"""Levels of folders in an owner's folder, many more than a cache has. `os.fwalk` calls itself for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBounds:
    """How much of a disk the cache takes."""

    default_bytes: int = 32 << 30
    """The most that it takes if nobody has said how much."""
    default_part: float = 0.25
    """The part of what is free, if that is less."""
    slack_part: float = 0.05
    """By how much processes may exceed their part before the agent removes blocks: they count what they
    write, and not the folders around it."""
    most_files: int = 1 << 20
    """A folder with more files is removed: no cache has so many, and looking through them has no end."""
    idle_s: float = 7 * 86_400.0
    """What nobody has used for so long is removed."""


def parts(limit: int, active: Mapping[str, bool]) -> dict[str, int]:
    """The bytes that each owner may have: those whose processes run share the cache. Pure.

    Args:
        limit: Bytes of the whole cache.
        active: Each owner that has a folder, and whether a process of theirs runs.
    """
    count = sum(active.values())
    return {owner: limit // count if runs else 0 for owner, runs in active.items()}


def cache_owner(user: str, job: str) -> str:
    """Whose part of the cache a job's processes use: its user's; of a job of nobody, its own."""
    return f"user {user}" if user else f"job {job}"


class CacheFolders:
    """The folders below `root`. All methods block on the disk; `tend` may take seconds.

    Args:
        root: This agent's own folder.
        limit_bytes: Of all folders; None: by `bounds`; 0: there is no cache.
        bounds: Bounds that nobody sets.
    """

    def __init__(self, root: Path, limit_bytes: int | None, bounds: CacheBounds = CacheBounds()) -> None:
        self._root = root.absolute()
        self._given = limit_bytes
        self._bounds = bounds
        self._owners: dict[str, str] = {}
        self._lock = threading.Lock()

    def open(self, process: str, owner: str) -> Path | None:
        """The folder for a process, from now until `close`; None: there is no cache, or no disk for it.

        Args:
            process: Its name.
            owner: Whose data it reads.
        """
        if self._given == 0:
            return None
        name = hashlib.sha256(owner.encode()).hexdigest()[:16]
        folder = self._root / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            log.warning("data is not cached", folder=str(self._root), reason=error.strerror)
            return None
        with self._lock:
            self._owners[process] = name
            self._grant()
        return folder

    def close(self, process: str) -> None:
        """The process has ended; its owner's part goes to the others, if it was the last one."""
        with self._lock:
            if self._owners.pop(process, None) is not None:
                self._grant()

    @contextmanager
    def opened(self, process: str, owner: str) -> Iterator[Path | None]:
        """`open`, and `close` after the block."""
        try:
            yield self.open(process, owner)
        finally:
            self.close(process)

    def _grant(self) -> dict[str, int]:
        """Writes what each owner may have, and returns it; without a process that is nothing."""
        active = {name: name in self._owners.values() for name in self._names()}
        granted = parts(self.limit_bytes, active)
        for name, bytes_ in granted.items():
            if active[name]:
                write_for_instance(self._root / name, LIMIT, str(bytes_))
        return granted

    def _names(self) -> list[str]:
        try:
            return sorted(
                entry.name for entry in os.scandir(self._root) if entry.is_dir(follow_symlinks=False)
            )
        except OSError:
            return []

    @property
    def limit_bytes(self) -> int:
        """Bytes of all folders together."""
        if self._given is None:
            try:
                disk = os.statvfs(self._root)
            except OSError:
                return 0
            free = disk.f_bavail * disk.f_frsize
            self._given = max(1, min(self._bounds.default_bytes, int(free * self._bounds.default_part)))
        return self._given

    def tend(self) -> int:
        """Removes what is too much, and returns the bytes that are left.

        Owners with processes keep their part, though no more. Of the others, the one whose folder was used
        last keeps most.
        """
        if self._given == 0:
            remove_folder(self._root)
            return 0
        with self._lock:
            granted = self._grant()
            running = set(self._owners.values())
        used = 0
        for name in sorted(running & granted.keys()):
            used += self._trim(name, granted[name], int(granted[name] * (1 + self._bounds.slack_part)))
        idle = sorted(((self._last_use(name), name) for name in granted.keys() - running), reverse=True)
        for last_use, name in idle:
            room = self.limit_bytes - used
            if time.time() - last_use > self._bounds.idle_s:
                remove_folder(self._root / name)
            else:
                used += self._trim(name, max(0, room), max(0, room))
        return used

    def _last_use(self, name: str) -> float:
        times = [0.0]
        for file in (".", "usage", "readers"):
            with suppress(OSError):
                times.append((self._root / name / file).lstat().st_mtime)
        return max(times)

    def _trim(self, name: str, keep: int, allowed: int) -> int:
        """Removes the oldest files of a folder down to `keep` bytes, if there are more than `allowed`.

        Users' code may write there: no link is followed, neither in names nor on the way. Returns what is
        left.
        """
        folder = self._root / name
        files = list(itertools.islice(_files(folder), self._bounds.most_files + 1))
        if len(files) > self._bounds.most_files:
            log.warning("more files than a cache has: removed", folder=str(folder))
            remove_folder(folder)
            return 0
        total = sum(size for _, size, *_ in files)
        if total <= allowed:
            return total
        gone: set[tuple[str, str]] = set()
        for _, size, where, file in sorted(files):
            if total <= keep:
                break
            total -= size
            gone.add((where, file))
        for where, names, directory in _folders(folder):
            for file in names:
                if (where, file) in gone:
                    with suppress(OSError):
                        os.unlink(file, dir_fd=directory)
        return total


def _files(folder: Path) -> Iterator[tuple[float, int, str, str]]:
    """(when written, bytes, folder, name) of all files but those that are about the folder itself.

    A folder counts as a file without bytes, since somebody might make nothing but folders.
    """
    for where, names, directory in _folders(folder):
        yield 0.0, 0, where, "."
        for name in names:
            if where == str(folder) and name in _OURS:
                continue
            with suppress(OSError):
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                yield status.st_mtime, status.st_blocks * 512, where, name


def _folders(folder: Path) -> Iterator[tuple[str, list[str], int]]:
    """(path, names of files, descriptor) of each folder; what lies deeper than a cache's is removed."""
    for where, folders, names, directory in os.fwalk(folder, follow_symlinks=False):
        if where.count(os.sep) - str(folder).count(os.sep) >= DEEPEST:
            for name in folders:
                remove_folder(name, dir_fd=directory)
            folders.clear()
        yield where, names, directory
