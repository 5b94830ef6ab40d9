"""Artifacts: files that outlive a process, behind one kind of URL: weights, checkpoints, datasets.

`bus://folder/…` is the object store of the bus; paths and `file://` are local folders; anything else goes
through fsspec (`s3://`, `memory://` …). A file that appears under a name is complete: local files are renamed
into place, and object stores publish a name only at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from bus.files.local_files import ContainedFolder
from bus.wire.request_progress import in_thread, moved
from bus.wire.secret_urls import hidden, resolved
from schemas.errors import BadInput, NotFound, Unavailable
from schemas.urls import UrlRules, fixed_part, local_path, within

if TYPE_CHECKING:
    from bus.connection import Bus

SCHEME = "bus://"
PIECE_BYTES = 1 << 20
"""Bytes that are read at once when a file is streamed."""

T = TypeVar("T")


class ReadableArtifacts(ABC):
    """A readable folder of files at `url`. Names are relative, with `/`; calls may raise `NotFound`."""

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    async def get_bytes(self, name: str) -> bytes:
        """The whole content of a file."""

    @abstractmethod
    def open_range(self, name: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """Streams `length` bytes from `start`, or up to the end."""

    @abstractmethod
    async def size(self, name: str) -> int:
        """The size of a file in bytes."""

    @abstractmethod
    async def list(self, prefix: str = "") -> list[str]:
        """The names that begin with `prefix`, sorted; empty if there is no such folder."""

    @abstractmethod
    async def exists(self, name: str) -> bool:
        """Whether there is such a file."""


class Artifacts(ReadableArtifacts):
    """A folder of files at `url` that can also be written."""

    @abstractmethod
    async def put_file(self, name: str, path: Path) -> None:
        """Stores a local file; a reader sees the old content or all of the new."""

    @abstractmethod
    async def put_bytes(self, name: str, data: bytes) -> None:
        """Stores bytes; a reader sees the old content or all of the new."""

    @abstractmethod
    async def get_file(self, name: str, path: Path) -> None:
        """Writes the content to a local file, which appears when it is complete."""

    async def delete(self, prefix: str = "") -> None:
        """Removes every file whose name begins with `prefix`; without a prefix, all files."""
        for name in await self.list(prefix):
            await self.delete_one(name)

    async def delete_one(self, name: str) -> None:
        """Removes one file; that somebody else has removed it already is no error."""
        with contextlib.suppress(NotFound):
            await self._remove(name)

    @abstractmethod
    async def _remove(self, name: str) -> None:
        """Removes one file."""


class FileSystemArtifacts(Artifacts):
    """A folder of a file system; blocking calls run in a thread."""

    async def open_range(self, name: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        end = await self.size(name)
        end = end if length is None else min(end, start + length)
        while start < end:
            piece = await self._piece(name, start, min(end - start, PIECE_BYTES))
            if not piece:
                return  # the file has become shorter
            yield piece
            start += len(piece)

    @abstractmethod
    async def _piece(self, name: str, start: int, count: int) -> bytes:
        """At most `count` bytes from `start`."""

    async def _call(self, name: str, call: Callable[[], T]) -> T:
        return await _in_thread(self.url, name, call)


_rules: list[UrlRules] = []


def restrict(rules: UrlRules, closed: Sequence[str] = ()) -> None:
    """Restricts this process, from now on, to what these rules allow, without the folders in `closed`."""
    _rules[:] = [rules]
    _closed[:] = [os.path.realpath(path) for path in closed]


_closed: list[str] = []
_only_bus: list[bool] = []


def open_only_bus() -> None:
    """Restricts this process, from now on, to the bus's object store.

    It is for processes that hold sessions and keys and serve all jobs. The URLs that jobs name are opened by
    the jobs' own processes and by nodes' workers (ADR-0040).
    """
    _only_bus[:] = [True]


def refusal(url: str, *, write: bool = False, instead: str = "") -> str:
    """What this process's `UrlRules.refusal` says; empty if there are no rules."""
    found = (rules.refusal(url, write=write, instead=instead) for rules in _rules)
    return next((reason for reason in found if reason), "")


def _check(url: str) -> None:
    """Checks a URL against the rules, with its path and host as they resolve now.

    Raises:
        BadInput: the URL is not allowed.
    """
    for rules in _rules:
        reason = rules.refusal(url)
        path = local_path(url)
        if not reason and path is not None and not rules.everything:
            real = os.path.realpath(fixed_part(path))
            folders = [os.path.realpath(folder) for folder in (*rules.read, *rules.write)]
            if not within(real, folders) or within(real, _closed):
                remedy = "" if within(real, _closed) else f"; start the mesh with --allow-url {real}"
                reason = f"{url} leads to {real}, which is in no folder that jobs may name{remedy}"
        if not reason and path is None and not url.startswith(SCHEME) and (host := urlsplit(url).hostname):
            reason = _inner(url, host)
        if reason:
            raise BadInput(hidden(reason))


def _inner(url: str, host: str) -> str:
    """Why a host is forbidden: it resolves to a link-local address, like a cloud's metadata service."""
    with contextlib.suppress(OSError):  # most likely a bucket's name, whose driver knows the host
        for *_, address in socket.getaddrinfo(host, None):
            if ipaddress.ip_address(str(address[0]).partition("%")[0]).is_link_local:
                return f"{url}: {host} stands for the link-local address {address[0]}"
    return ""


def open_on_bus(url: str, bus: Bus | None) -> Artifacts:
    """The folder of the bus's object store that `url` names; it need not exist yet.

    Raises:
        BadInput: the URL is no `bus://`, `restrict` forbids it, or there is no bus.
    """
    if not url.startswith(SCHEME):
        raise _elsewhere(url)
    _check(url)
    if bus is None:
        raise BadInput(f"{url}: not connected to a bus; give a path or another URL")
    return BusArtifacts(url, bus)


def _elsewhere(url: str) -> BadInput:
    return BadInput(f"{url}: this process opens nothing but {SCHEME}; a job's own processes and nodes do")


def open_artifacts(url: str, bus: Bus | None) -> Artifacts:
    """The folder that `url` names; it need not exist yet.

    Raises:
        BadInput: the URL is a `bus://` and there is no bus; fsspec does not know the scheme, or its driver is
            missing; or `restrict` or `open_only_bus` forbids the URL.
    """
    if url.startswith(SCHEME):
        return open_on_bus(url, bus)
    if _only_bus:
        raise _elsewhere(url)
    address, _ = resolved(url)
    local = local_path(address)
    if local is None:
        return FileArtifacts(url)
    _check(address)
    return LocalArtifacts(url, local)


class BusArtifacts(Artifacts):
    """A folder of the bus's object store; an object's name is its URL without the scheme."""

    def __init__(self, url: str, bus: Bus) -> None:
        super().__init__(url)
        self._folder = url.removeprefix(SCHEME).strip("/")
        if not self._folder:
            raise BadInput(f"{url} names no folder; write bus://folder")
        self._objects = bus.objects

    def _name(self, name: str) -> str:
        return f"{self._folder}/{_checked(name)}"

    async def put_file(self, name: str, path: Path) -> None:
        await self._objects.put(self._name(name), path)

    async def put_bytes(self, name: str, data: bytes) -> None:
        await self._objects.put(self._name(name), data)

    async def get_bytes(self, name: str) -> bytes:
        return b"".join([piece async for piece in self.open_range(name)])

    async def get_file(self, name: str, path: Path) -> None:
        with _replacing(path) as temporary, open(temporary, "wb") as file:  # noqa: ASYNC230  # page cache
            async for piece in self.open_range(name):
                file.write(piece)

    def open_range(self, name: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        return self._objects.get(self._name(name), start, length)

    async def size(self, name: str) -> int:
        return (await self._objects.info(self._name(name))).size

    async def list(self, prefix: str = "") -> list[str]:
        objects = await self._objects.list(f"{self._folder}/{prefix}")
        return sorted(info.name.removeprefix(f"{self._folder}/") for info in objects)

    async def exists(self, name: str) -> bool:
        try:
            await self._objects.info(self._name(name))
        except NotFound:
            return False
        return True

    async def _remove(self, name: str) -> None:
        await self._objects.delete(self._name(name))


class LocalArtifacts(FileSystemArtifacts):
    """A folder of this machine; calls follow no link below the folder."""

    def __init__(self, url: str, root: str) -> None:
        super().__init__(url)
        self._folder = ContainedFolder(root)

    async def put_file(self, name: str, path: Path) -> None:
        def copy() -> None:
            with self._folder.replacing(name, _temporary()) as file, open(path, "rb") as read:
                while piece := read.read(PIECE_BYTES):
                    _write_all(file, piece)

        await self._call(_checked(name), copy)

    async def put_bytes(self, name: str, data: bytes) -> None:
        def write() -> None:
            with self._folder.replacing(name, _temporary()) as file:
                _write_all(file, data)

        await self._call(_checked(name), write)

    async def get_bytes(self, name: str) -> bytes:
        return b"".join([piece async for piece in self.open_range(name)])

    async def get_file(self, name: str, path: Path) -> None:
        def copy() -> None:
            with (
                self._folder.reading(name) as file,
                _replacing(path) as temporary,
                open(temporary, "wb") as to,
            ):
                while piece := os.read(file, PIECE_BYTES):
                    to.write(piece)

        await self._call(_checked(name), copy)

    async def _piece(self, name: str, start: int, count: int) -> bytes:
        def read() -> bytes:
            with self._folder.reading(name) as file:
                return os.pread(file, count, start)

        return await self._call(name, read)

    async def size(self, name: str) -> int:
        def read_size() -> int:
            with self._folder.reading(name) as file:
                return os.fstat(file).st_size

        return await self._call(_checked(name), read_size)

    async def list(self, prefix: str = "") -> list[str]:
        names = await self._call(prefix, self._folder.names)
        return sorted(name for name in names if name.startswith(prefix) and not _is_temporary(name))

    async def exists(self, name: str) -> bool:
        try:
            await self.size(name)
        except (NotFound, BadInput):
            return False
        return True

    async def _remove(self, name: str) -> None:
        await self._call(name, partial(self._folder.remove, name))
        await asyncio.to_thread(self._folder.prune, name)


class FileArtifacts(FileSystemArtifacts):
    """A folder of any file system that fsspec opens."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._fs, self._root = open_filesystem(url)

    def _path(self, name: str) -> str:
        return f"{self._root}/{_checked(name)}"

    async def put_file(self, name: str, path: Path) -> None:
        target = self._path(name)
        await self._call(
            name,
            lambda: self._write(target, lambda: self._fs.put_file(str(path), target, callback=_counting())),
        )

    async def put_bytes(self, name: str, data: bytes) -> None:
        target = self._path(name)
        await self._call(name, lambda: self._write(target, lambda: self._fs.pipe_file(target, data)))

    def _write(self, target: str, write: Callable[[], Any]) -> None:
        self._fs.makedirs(self._fs._parent(target), exist_ok=True)
        write()

    async def get_bytes(self, name: str) -> bytes:
        return bytes(await self._call(name, lambda: self._fs.cat_file(self._path(name))))

    async def get_file(self, name: str, path: Path) -> None:
        with _replacing(path) as temporary:
            await self._call(
                name, lambda: self._fs.get_file(self._path(name), str(temporary), callback=_counting())
            )

    async def _piece(self, name: str, start: int, count: int) -> bytes:
        path, end = self._path(name), start + count
        return bytes(await self._call(name, lambda: self._fs.cat_file(path, start=start, end=end)))

    async def size(self, name: str) -> int:
        return int(await self._call(name, lambda: self._fs.size(self._path(name))))

    async def list(self, prefix: str = "") -> list[str]:
        paths = await self._call(prefix, self._find)
        names = (path.removeprefix(self._root).lstrip("/") for path in paths)
        return sorted(name for name in names if name.startswith(prefix) and not _is_temporary(name))

    def _find(self) -> Sequence[str]:
        self._fs.invalidate_cache()  # cached listings are outdated, because others write here too
        paths: Sequence[str] = self._fs.find(self._root)
        return paths

    async def exists(self, name: str) -> bool:
        return bool(await self._call(name, lambda: self._fs.isfile(self._path(name))))

    async def _remove(self, name: str) -> None:
        await self._call(name, lambda: self._fs.rm_file(self._path(name)))


def _counting() -> Any:
    """An fsspec callback that counts progress; most drivers wait in threads of their own."""
    from fsspec.callbacks import Callback

    reached = 0

    def count(size: int | None, value: int, **_: Any) -> None:
        nonlocal reached
        moved(max(0, value - reached))
        reached = max(reached, value)

    return Callback(hooks={"moved": count})


async def _in_thread(url: str, name: str, call: Callable[[], T]) -> T:
    try:
        return await in_thread(call)
    except FileNotFoundError:
        raise NotFound(f"{url}: there is no {name or 'such folder'}") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EXDEV):
            raise BadInput(f"{url}: {name}: a symbolic link is on the way; none is followed") from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unavailable(f"{url}: {name}: {error.strerror}; free space there") from error
        raise BadInput(f"{url}: {name}: {error.strerror or error}") from error


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system for a URL or path, and the path on it.

    Raises:
        BadInput: there is no such scheme, its driver is not installed, or the URL is forbidden.
    """
    if _only_bus:
        raise _elsewhere(url)
    import fsspec  # most processes of the mesh open no files

    try:
        address, options = resolved(url)
        _check(address)
        if "endpoint_url" in options:
            _check(options["endpoint_url"])
        if _rules and address.startswith(("http:", "https:")):
            options["allow_redirects"] = False  # the target of a redirect was not checked
        opened: tuple[Any, str] = fsspec.core.url_to_fs(address, **options)
    except ImportError as error:
        raise BadInput(f"{url}: {hidden(str(error))}") from None
    except (ValueError, OSError, TypeError) as error:
        raise BadInput(f"{url} can't be opened: {hidden(str(error))}") from None
    filesystem, path = opened
    return filesystem, path.rstrip("/") if len(path) > 1 else path


def allowed_address(url: str) -> tuple[str, bool]:
    """What a URL stands for, and whether redirects may be followed, for callers with a client of their own.

    Raises:
        BadInput: the URL is forbidden.
    """
    if _only_bus:
        raise _elsewhere(url)
    address, _ = resolved(url)
    _check(address)
    return address, not _rules


def _checked(name: str) -> str:
    """The name, if it stays inside its folder; names come from the wire, too."""
    parts = name.split("/")
    if not name or "" in parts or "." in parts or ".." in parts or "\\" in name or "\0" in name:
        raise BadInput(f"{name!r} is not the name of an artifact")
    return name


_TEMPORARY = ".part-"


def _is_temporary(name: str) -> bool:
    return name.rsplit("/", 1)[-1].startswith(_TEMPORARY)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, which replaces it after the block, or is removed after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    os.close(handle)
    try:
        yield Path(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _umask() -> int:
    """The process's umask, from /proc because `os.umask` can read it only by setting it; else 022."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("Umask:")[1].split()[0], 8)
    except (OSError, IndexError, ValueError):
        return 0o022


def _temporary() -> str:
    return f"{_TEMPORARY}{secrets.token_hex(8)}"


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
