"""Users' files: stored, listed, read, deleted. Nobody sees another's."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from entities.gateway.batches.shared_read import SharedRead
from entities.gateway.storage.uploads import Uploads
from schemas.base import is_token
from schemas.errors import BadInput, Conflict, NotFound, OverQuota
from schemas.services.batches import FILES_FOLDER, MOST_FILES, BatchRecord, BatchUnit, StoredFile
from schemas.signals import AccessDecision

log = get_logger("door")


class FileStore:
    """The files of all users. `hold_s`: for which room is held for an upload whose gateway is silent."""

    def __init__(self, bus: Bus, uploads: Uploads, hold_s: float = 30.0) -> None:
        self._bus = bus
        self._objects = bus.objects
        self._uploads = uploads
        self._hold_s = hold_s
        self._files = bus.bucket(subjects.STORED_FILE)
        self._units = bus.bucket(subjects.BATCH_UNIT)
        self._all = SharedRead(self._files.entries)

    async def store(
        self,
        access: AccessDecision,
        filename: str,
        pieces: AsyncIterator[bytes],
        stated_bytes: int,
        file: str = "",
    ) -> StoredFile:
        """Stores a file. `file`: its id, of a request that may come again.

        Raises:
            OverQuota: the user has no room for it, or as many files as they may.
            BadInput: the pieces are those of a wrong body.
        """
        if len(await self.each(access.user)) >= MOST_FILES:
            text = f"you have {MOST_FILES:,} files, which is the most; delete some"
            raise OverQuota(text, user=access.user)
        file = file or f"file-{secrets.token_hex(12)}"
        name = f"{folder_of(access.user)}/{file}"
        size, digest = await self.put(access, name, pieces, stated_bytes)
        record = StoredFile(
            file=file,
            user=access.user,
            filename=filename,
            size_bytes=size,
            sha256=digest,
            created_at=time.time(),
        )
        await self._files.put(record, file=file)
        log.info("file stored", file=file, bytes=size, user=access.user)
        return record

    async def put(
        self, access: AccessDecision, name: str, data: bytes | AsyncIterator[bytes], stated_bytes: int
    ) -> tuple[int, str]:
        """Stores an object in a user's folder, within the user's quota; returns its size and SHA-256."""
        pieces = _once(data) if isinstance(data, bytes) else data
        async with self._uploads.begin(access, name, stated_bytes, self._hold_s) as upload:
            info = await self._objects.put(name, upload.within(pieces), upload.nuid)
        return info.size, info.digest

    async def drop(self, names: tuple[str, ...]) -> None:
        """Removes objects; those that are not there are no matter."""
        for name in names:
            if name:
                await self._objects.delete(name)

    async def sweep(self, record: BatchRecord, units: Iterable[BatchUnit]) -> None:
        """Removes answers of a batch that are those of none of its units."""
        kept = {name for unit in units for name in (unit.output, unit.errors)}
        stored = await self._objects.list(f"{folder_of(record.user)}/{record.batch}/")
        await self.drop(tuple(info.name for info in stored if info.name not in kept))

    async def get(self, file: str, user: str) -> StoredFile:
        """A user's own file. Raises `NotFound`, also of another's."""
        entry = await self._files.get(leader=True, file=file) if is_token(file) else None
        if entry is None or entry.message.user != user:
            raise NotFound(
                f"there is no file {file[:200]!r} of yours; GET /v1/files lists them",
                reason="file_not_found",
                param="file",
            )
        found: StoredFile = entry.message
        return found

    async def each(self, user: str) -> list[StoredFile]:
        """A user's files, newest first."""
        entries = await self._all()
        own = [entry.message for entry in entries if entry.message.user == user]
        return sorted(own, key=lambda each: (-each.created_at, each.file))

    async def enter(self, record: StoredFile) -> None:
        """A file of a batch's answers; twice is fine."""
        with suppress(Conflict):
            await self._files.create(record, file=record.file)

    async def content(self, record: StoredFile) -> AsyncIterator[bytes]:
        """Its bytes."""
        for name in await self._objects_of(record):
            async for piece in self._objects.get(name):
                yield piece

    async def delete(self, record: StoredFile) -> None:
        """Removes the file and its bytes."""
        names = await self._objects_of(record)
        await self._files.delete(file=record.file)
        await self.drop(tuple(names))
        log.info("file removed", file=record.file, user=record.user)

    async def _objects_of(self, record: StoredFile) -> list[str]:
        if record.batch is None:
            return [f"{folder_of(record.user)}/{record.file}"]
        entries = await self._units.entries(batch=record.batch)
        units: list[BatchUnit] = sorted((entry.message for entry in entries), key=lambda unit: unit.unit)
        # One that a gateway decided late, which did not know of the batch's end, is in no file.
        within = {number for first, count in record.units for number in range(first, first + count)}
        names = [
            unit.output if record.part == "output" else unit.errors for unit in units if unit.unit in within
        ]
        return [name for name in names if name]


def folder_of(user: str) -> str:
    """Where a user's files lie.

    Raises:
        BadInput: the user's name can't be that of a folder.
    """
    if not is_token(user):
        raise BadInput(f"user {user!r} can't store files: the name has more than letters, digits, - and _")
    return f"{FILES_FOLDER}/{user}"


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
