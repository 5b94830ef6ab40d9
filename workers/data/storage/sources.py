"""Where ranges of files come from. A file's state is pinned when it is opened; ranges are of that state.

| URL | state | how a range is known to be of that state |
|---|---|---|
| a path, `file://` | size, time of change, inode | `fstat` after the read, on the same descriptor |
| `http(s)://` | size, ETag or Last-Modified | the answer's own headers |
| `s3://` | size, ETag | the answer's own headers |
| `hf://` | the commit | it is in the request |
| other of fsspec | size, and what `info` tells | `info` after the read |
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Any
from urllib.parse import unquote

from bus.files.artifacts import open_filesystem
from bus.wire.secret_urls import hidden, resolved
from schemas.errors import BadData
from workers.data.storage.retrying import SourceChanged

EDGE_BYTES = 1 << 16
"""Bytes at either end of a local file that go into its digest, beside its name and size."""
EDGES_BYTES = 1 << 30
"""Of all edges at most: a million images are not read whole at each start."""
LEAST_EDGE_BYTES = 512
MARKS = (
    *("ETag", "etag", "version_id", "checksum", "sha256", "blob_id", "md5Hash", "generation"),
    *("content_settings", "mtime", "LastModified", "last_modified", "modificationTime", "created"),
)
"""What file systems of fsspec tell of a file that changes with its content, the surest first."""


FilePart = tuple[int, Sequence[memoryview]]
"""Where a range of a file begins, and the places that its bytes go to, one after another."""


def edge_bytes(files: int) -> int:
    """Bytes at either end of each of so many local files that go into their digest."""
    return max(LEAST_EDGE_BYTES, min(EDGE_BYTES, EDGES_BYTES // (2 * max(1, files))))


def marks(info: Mapping[str, Any]) -> list[str]:
    """Those of `MARKS` that a file has, with their names."""
    return [f"{key}={info[key]}" for key in MARKS if info.get(key)]


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file was when it was opened: its size in bytes, and a mark that changes with its content.

    Without a mark nobody can tell whether a block that another process kept is of this content.
    """

    size: int
    mark: str


class FileSource(ABC):
    """The files below one URL. Calls block; they raise what their library raises (`retrying` sorts that).

    Names are relative to the URL, with `/`; the empty name is the file that the URL itself names.
    """

    cached = True
    """Whether blocks of it are worth a place in the node's cache; not those of local files."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def state(self, name: str) -> FileState:
        """The present state of a file. Raises `FileNotFoundError`."""

    @abstractmethod
    def read(self, name: str, start: int, length: int, state: FileState) -> bytes:
        """`length` bytes from `start`, which lie within `state.size`. Raises `SourceChanged`."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of all files below the URL, sorted, or those that match it if it is a pattern."""

    def identity(self, name: str) -> str:
        """What the file is called in keys of the cache; the same for all who may read it."""
        return f"{resolved(self.url)[0]}\n{name}"

    def described(self, name: str) -> str:
        """The file's URL for people."""
        return hidden(f"{self.url.rstrip('/')}/{name}" if name else self.url)

    def changed(self, name: str, now: FileState | None = None) -> SourceChanged:
        why = "" if now is None else f" (now {now.size:,} bytes, {hidden(now.mark) or 'no ETag'})"
        return SourceChanged(
            f"{self.described(name)} has changed since it was opened{why}; "
            "data must stay as it is while a job reads it: give new data a new name"
        )

    def close(self) -> None:  # noqa: B027  # most have nothing to free
        """Frees connections. Idempotent."""


def joined(path: str, name: str) -> str:
    """The path of a file below another one.

    Raises:
        BadData: the name leads out of it. Names come from indices of data, too.
    """
    if ".." in unquote(name).split("/") or name.startswith("/") or "\0" in name or "\\" in name:
        raise BadData(f"{name!r} is not the name of a file below {hidden(path)}")
    return f"{path.rstrip('/')}/{name}" if name else path


_ADVISE = getattr(os, "posix_fadvise", None)  # not everywhere
_REGION_BYTES = 4 << 20


class LocalSource(FileSource):
    """Files of this machine, by descriptors that stay open: the page cache is their cache.

    Samples are drawn in any order, but from few shards at a time, so what lies beside one is needed soon: the
    first read of a region asks the system for all of it, which takes no longer than one read from a disk.

    Args:
        url: Their folder, or the file.
        most_open: Descriptors.
        most_regions: Regions that are known to have been asked for; pages of others may be gone by now.
        own: Whether it is a folder of this process, which no job names and no rule forbids.
    """

    cached = False

    def __init__(
        self, url: str, *, most_open: int = 128, most_regions: int = 1024, own: bool = False
    ) -> None:
        super().__init__(url)
        opened: tuple[Any, str] = (None, url) if own else open_filesystem(url)
        self._filesystem, self._path = opened
        self._most_open = most_open
        self._files: OrderedDict[str, FileIO] = OrderedDict()
        self._most_regions = most_regions
        self._regions: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._lock = threading.Lock()

    def state(self, name: str) -> FileState:
        with open(joined(self._path, name), "rb", buffering=0) as file:
            return _local_state(os.fstat(file.fileno()))

    def read(self, name: str, start: int, length: int, state: FileState) -> bytes:
        file = self._open(name)
        self._ask_ahead(name, file, start, length)
        data = os.pread(file.fileno(), length, start)
        while 0 < len(data) < length:
            more = os.pread(file.fileno(), length - len(data), start + len(data))
            if not more:
                break
            data += more
        now = _local_state(os.fstat(file.fileno()))
        if now != state or len(data) != length:
            raise self.changed(name, now)
        return data

    def read_into(self, name: str, parts: Sequence[FilePart], length: int, state: FileState) -> None:
        """Reads ranges, each of that length, to where they are wanted. Raises as `read` does."""
        file = self._open(name)
        number = file.fileno()
        for start, places in parts:
            self._ask_ahead(name, file, start, length)
            if os.preadv(number, places, start) != length:
                data = memoryview(self.read(name, start, length, state))
                for place in places:
                    place[:] = data[: place.nbytes]
                    data = data[place.nbytes :]
        now = _local_state(os.fstat(number))
        if now != state:
            raise self.changed(name, now)

    def _ask_ahead(self, name: str, file: FileIO, start: int, length: int) -> None:
        region = start // _REGION_BYTES
        if _ADVISE is None or length >= _REGION_BYTES or (name, region) in self._regions:
            return
        with self._lock:
            self._regions[name, region] = None
            while len(self._regions) > self._most_regions:
                self._regions.popitem(last=False)
        _ADVISE(file.fileno(), region * _REGION_BYTES, _REGION_BYTES, os.POSIX_FADV_WILLNEED)

    def _open(self, name: str) -> FileIO:
        """The file, open; one that was dropped from here is closed when its last reader is done."""
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = FileIO(joined(self._path, name), "rb")
                while len(self._files) > self._most_open:
                    self._files.popitem(last=False)
            else:
                self._files.move_to_end(name)
            return file

    def close(self) -> None:
        with self._lock:
            self._files.clear()

    def names(self) -> list[str]:
        return listed(self._filesystem, self._path)

    def identity(self, name: str) -> str:
        return joined(self._path, name)


def _local_state(status: os.stat_result) -> FileState:
    return FileState(status.st_size, f"{status.st_mtime_ns}-{status.st_ino}")


class FilesystemSource(FileSource):
    """Any file system of fsspec. A read is followed by a look whether the file is still the same.

    Args:
        url: Its URL.
        opened: The file system and the path on it, if they were opened already.
    """

    def __init__(self, url: str, opened: tuple[Any, str] | None = None) -> None:
        super().__init__(url)
        self.filesystem, self.path = opened or open_filesystem(url)

    def state(self, name: str) -> FileState:
        path = joined(self.path, name)
        self.filesystem.invalidate_cache()  # a listing that was kept would hide a change
        info = self.filesystem.info(path)
        if info.get("type") == "directory":
            raise FileNotFoundError(path)
        if info.get("size") is None:
            raise BadData(f"{self.described(name)}: its size is not known, so that no part of it can be read")
        return FileState(int(info["size"]), "/".join(marks(info)))

    def read(self, name: str, start: int, length: int, state: FileState) -> bytes:
        data = bytes(self.filesystem.cat_file(joined(self.path, name), start=start, end=start + length))
        now = self.state(name)
        if now != state:
            raise self.changed(name, now)
        if len(data) != length:
            raise OSError(f"{len(data):,} bytes came, not {length:,}")
        return data

    def names(self) -> list[str]:
        return listed(self.filesystem, self.path)


def listed(filesystem: Any, path: str) -> list[str]:
    """The names of files below a path, or those that match it, without hidden ones."""
    filesystem.invalidate_cache()
    if any(magic in path for magic in "*?["):
        base = path[: min(path.index(magic) for magic in "*?[" if magic in path)].rpartition("/")[0]
        found = [found for found in filesystem.glob(path) if filesystem.isfile(found)]
    else:
        base, found = path, filesystem.find(path)
    names = (name.removeprefix(base).lstrip("/") for name in found if name != path)
    return sorted(name for name in names if not any(part.startswith(".") for part in name.split("/")))
