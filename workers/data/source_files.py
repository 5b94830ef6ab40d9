"""The files of a source: which there are, what identifies them, and how they are opened."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from bus.files.artifacts import SCHEME, open_artifacts, open_filesystem
from bus.wire.secret_urls import hidden
from schemas.errors import BadData, BadInput, NotFound
from schemas.urls import FEEDS, STDLIB, bus_name, local_path
from workers.data.storage.node_cache import open_file
from workers.data.storage.sources import EDGE_BYTES, edge_bytes, marks

_NOT_SOURCE = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "_bundled", "pydoc_data"}
)
"""Folders of the standard library that are left out: installed packages, tests, bundled wheels and a
generated table. About 12 MB of readable source remain."""
_COPIED_BYTES = 4 << 20
"""Bytes of a file that are copied at a time."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source.

    Attributes:
        name: Its path within the source: the same on every node.
        size: Bytes.
        version: The store's ETag or the like (`MARKS`); empty if it has none.
        local: Where it lies, if that is on this machine.
    """

    name: str
    size: int
    version: str = ""
    local: Path | None = None
    _filesystem: Any = field(default=None, repr=False, compare=False)
    _path: str = field(default="", repr=False, compare=False)

    @property
    def path(self) -> str:
        """Where it is on its source's file system."""
        return str(self.local) if self.local is not None else self._path

    def open(self) -> BinaryIO:
        """Opens it to read at any place. A remote file is read by ranges."""
        if self.local is not None:
            return self.local.open("rb")
        return cast(BinaryIO, open_file(self._filesystem, self._path))

    def head(self, count: int = 512) -> bytes:
        """Its first bytes."""
        with self.open() as file:
            return file.read(count)

    def identity(self, edge: int = EDGE_BYTES) -> str:
        """What tells it from another: its ends, of so many bytes each, if it lies here, else its version."""
        if self.local is None:
            return f"{self.name} {self.size} {self.version}"
        with self.local.open("rb") as file:
            ends = hashlib.sha256(file.read(edge))
            file.seek(max(edge, self.size - edge))
            ends.update(file.read(edge))
        return f"{self.name} {self.size} {ends.hexdigest()}"


def copy_file(file: SourceFile, target: IO[bytes]) -> None:
    """Copies a file's bytes to the end of an open one on this machine's disk.

    Raises:
        BadData: They do not fit there.
        OSError: The file can't be read.
    """
    try:
        with file.open() as source:
            shutil.copyfileobj(source, target, _COPIED_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BadData(
            f"{file.name} ({file.size:,} bytes) is copied to this node's disk to be read from any place, and "
            "does not fit: free some of it, or set TMPDIR to a folder with more room"
        ) from None


def files_digest(files: Sequence[SourceFile], *more: object) -> str:
    """SHA-256 of what identifies the files, in their order, and of what else decides how they are read."""
    digest = hashlib.sha256()
    edge = edge_bytes(len(files))
    for line in itertools.chain((file.identity(edge) for file in files), map(str, more)):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def combined_digest(digests: Iterable[str]) -> str:
    """One digest of several, in their order; of one, itself."""
    several = list(digests)
    return several[0] if len(several) == 1 else hashlib.sha256("\n".join(several).encode()).hexdigest()


async def fetch_uploads(urls: Mapping[str, str], bus: Any, folder: Path) -> dict[str, Path]:
    """Fetches what the job names on the bus: URL → file.

    Args:
        urls: Key in the job file → URL; those elsewhere are left out.
        bus: The connection.
        folder: Where the files go.

    Raises:
        BadData: Something is not there, or there is no connection.
    """
    fetched: dict[str, Path] = {}
    for place, url in urls.items():
        if not url.startswith(SCHEME) or url in fetched or bus_name(url).startswith(f"{FEEDS}/"):
            continue
        upper, _, name = url.rpartition("/")
        path = folder / f"upload-{len(fetched)}" / name
        try:
            await open_artifacts(upper, bus).get_file(name, path)
        except NotFound:
            raise BadData(f"{place} {url} is not on the bus; upload it at a gateway first") from None
        except BadInput as error:
            raise BadData(f"{place} {error.text}") from None
        fetched[url] = path
    return fetched


def list_files(
    source: str, fetched: Mapping[str, Path] = {}, *, key: str = "data.source", endings: tuple[str, ...] = ()
) -> list[SourceFile]:
    """The files of a source, sorted by path: of a file, a folder (without hidden ones), or a glob.

    Args:
        source: `stdlib:`; `bus://datasets/NAME`; any path or URL that fsspec opens.
        fetched: `bus://` URL → file, for those that were fetched.
        key: The source's key in the job file, for error texts.
        endings: Of a folder, only the files with one of these; none: all.

    Raises:
        BadData: It is missing or can't be read, or no file fits.
    """
    if source.startswith(STDLIB):
        return _standard_library(key)
    if source in fetched:
        path = fetched[source]
        return [SourceFile(path.name, path.stat().st_size, local=path)]
    if source.startswith(SCHEME):
        raise BadData(f"{key} {source} was not fetched: not connected to a bus")
    from fsspec.implementations.local import LocalFileSystem  # most processes of the mesh open no files

    try:
        filesystem, path_text = open_filesystem(source)
    except BadInput as error:
        raise BadData(f"{key} {error.text}") from None
    try:
        found, root = _found(filesystem, path_text, source, key)
    except OSError as error:
        raise BadData(f"{key} {source} can't be read: {hidden(str(error.strerror or error))}") from None
    if endings and (len(found) > 1 or root == path_text):
        fitting = {name: facts for name, facts in found.items() if name.lower().endswith(endings)}
        if not fitting:
            raise BadData(f"{key} {source}: no file ends with {' or '.join(endings)}")
        found = fitting
    is_local = isinstance(filesystem, LocalFileSystem)
    return [
        SourceFile(
            name.removeprefix(root).lstrip("/") or name.rpartition("/")[2],
            int(facts["size"] or 0),
            "" if is_local else next(iter(marks(facts)), ""),
            Path(name) if is_local else None,
            filesystem,
            name,
        )
        for name, facts in sorted(found.items())
    ]


def find_file(
    source: str, path: str, fetched: Mapping[str, Path] = {}, *, key: str = "data.source"
) -> SourceFile:
    """One file of a source, by `SourceFile.path`, or by its path within the standard library.

    Raises:
        BadData: It is missing or can't be read.
    """
    if source in fetched:
        return list_files(source, fetched, key=key)[0]
    if source.startswith(STDLIB):
        local = Path(sysconfig.get_paths()["stdlib"], path)
        if not local.is_file():
            raise BadData(f"{key} {STDLIB} {path} is not in this node's standard library")
        return SourceFile(path, local.stat().st_size, local=local)
    is_local = local_path(source) is not None
    try:
        filesystem, path = open_filesystem(path) if is_local else (open_filesystem(source)[0], path)
        facts = filesystem.info(path)
    except BadInput as error:
        raise BadData(f"{key} {error.text}") from None
    except FileNotFoundError:
        raise BadData(f"{key} {hidden(path)} is not there, or no longer") from None
    except OSError as error:
        raise BadData(f"{key} {hidden(path)} can't be read: {hidden(str(error.strerror or error))}") from None
    size = int(facts["size"] or 0)
    if is_local:
        return SourceFile(path, size, local=Path(path))
    return SourceFile(path, size, next(iter(marks(facts)), ""), None, filesystem, path)


def _found(filesystem: Any, path: str, source: str, key: str) -> tuple[dict[str, Any], str]:
    """Path → facts of each file, and the path that their names are relative to."""
    if any(magic in path for magic in "*?["):
        entries = filesystem.glob(path, detail=True)
        files = {name: facts for name, facts in entries.items() if facts["type"] == "file"}
        if not files:
            raise BadData(f"{key} {source}: no file matches")
        return files, os.path.commonpath([name.rpartition("/")[0] for name in files])
    if filesystem.isdir(path):
        files = filesystem.find(path, detail=True)
        return {name: facts for name, facts in files.items() if not _hidden(name.removeprefix(path))}, path
    if filesystem.exists(path):
        return {path: filesystem.info(path)}, path.rpartition("/")[0]
    raise BadData(f"{key} {source} does not exist on this node; give a path or URL that every node can read")


def _hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _standard_library(key: str) -> list[SourceFile]:
    """The running interpreter's own standard library, `*.py` sorted by path, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_SOURCE]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    if not paths:
        raise BadData(f"{key} {STDLIB} {sys.executable} keeps no sources in {root}; name a folder")
    return [
        SourceFile(os.path.relpath(path, root), os.path.getsize(path), local=Path(path))
        for path in sorted(paths)
    ]
