"""Where units keep their outputs: bytes by their SHA-256, in a folder, at a URL, or on the bus."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bus.files.artifacts import Artifacts
from schemas.data_set.units import StoredObject
from schemas.errors import BadData, NotFound

T = TypeVar("T")


class UnitStore(Protocol):
    """Bytes by their digest. Calls block; a unit makes them on its own thread."""

    def write(self, path: Path) -> StoredObject:
        """Stores a file's content. The file may be gone afterwards.

        Raises:
            BadInput: It can't be written. Unavailable: not now.
        """
        ...

    def open(self, stored: StoredObject) -> Path:
        """A local file with these bytes, which were compared with their digest. It is not to be written.

        Raises:
            BadData: It is not there, or holds other bytes.
            Unavailable: It can't be read now.
        """
        ...


class FolderUnitStore:
    """A folder of this machine.

    Args:
        folder: Made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, path: Path) -> StoredObject:
        stored = digested(path)
        target = self.folder / stored.name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{secrets.token_hex(8)}")
            shutil.copyfile(path, temporary)
            os.replace(temporary, target)
        return stored

    def open(self, stored: StoredObject) -> Path:
        return checked(self.folder / stored.name, stored, str(self.folder))


class ArtifactUnitStore:
    """A folder at any URL that artifacts may have, the bus's object store among them.

    Args:
        artifacts: The folder, as `bus.files.artifacts.open_artifacts` opens it.
        folder: Of this process alone: what was fetched lies there until the process ends.
        loop: The running event loop; never the thread that makes calls here.
    """

    def __init__(self, artifacts: Artifacts, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._artifacts = artifacts
        self._folder = folder
        self._loop = loop

    def write(self, path: Path) -> StoredObject:
        stored = digested(path)
        self._call(self._put(stored, path))
        return stored

    async def _put(self, stored: StoredObject, path: Path) -> None:
        with contextlib.suppress(NotFound):
            if await self._artifacts.size(stored.name) == stored.bytes:
                return  # another attempt at this unit has stored the same
        await self._artifacts.put_file(stored.name, path)

    def open(self, stored: StoredObject) -> Path:
        path = self._folder / stored.sha256
        if not path.exists():
            try:
                self._call(self._artifacts.get_file(stored.name, path))
            except NotFound:
                raise BadData(f"{self._artifacts.url} has no {stored.name}; build again") from None
        return checked(path, stored, self._artifacts.url)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def digested(path: Path) -> StoredObject:
    """A file's size and SHA-256."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return StoredObject(sha256=digest, bytes=path.stat().st_size)


def checked(path: Path, stored: StoredObject, where: str) -> Path:
    """The path, if the file there holds these bytes.

    Raises:
        BadData: It does not.
    """
    try:
        found = digested(path)
    except FileNotFoundError:
        raise BadData(f"{where} has no {stored.name}; build again") from None
    if (found.sha256, found.bytes) != (stored.sha256, stored.bytes):
        raise BadData(
            f"{where}: {stored.name} holds other bytes ({found.bytes:,} of SHA-256 {found.sha256[:12]}…): it "
            "was changed or damaged; remove it, and build again"
        )
    return path
