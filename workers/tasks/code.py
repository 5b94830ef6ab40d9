"""Fetches the code that travels with a job, and unpacks it, in a short-lived worker (ADR-0051).

No user code runs here, but the archive is a user's: so the process is confined to the one folder that it
fills, and holds the archive to all rules of `schemas.job_file.code`, whatever client packed it.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

from bus.connection import Bus
from schemas.envelope import EntityKind
from schemas.errors import BadModel, Conflict, NotFound
from schemas.job_file.code import (
    ARCHIVE_BYTES,
    ARCHIVE_FILES,
    MOST_RATIO,
    RATIO_FREE_BYTES,
    UNPACKED_BYTES,
    refuse_name,
    refuse_twins,
)
from schemas.urls import bus_name
from workers.tasks.short_lived import answer

_PIECE_BYTES = 1 << 20
_ATTEMPTS = 3  # an archive that is stored a second time is there again at once
_ENCRYPTED = 1
_KINDS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DAMAGES = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    NotImplementedError,
    RuntimeError,
)


def main(payload: dict[str, Any], result: Path | None = None) -> int:
    """Entry point under the fork server: writes {"files": count} or {"failed": {"code", "text"}}.

    Args:
        payload: With url and sha256 of the archive; folder: the empty one to fill; servers, sid, token.
        result: The file to write.
    """
    return answer(_main, payload, result)


async def _main(payload: dict[str, Any]) -> dict[str, Any]:
    data = await _fetch(payload)
    if hashlib.sha256(data).hexdigest() != payload["sha256"]:
        raise BadModel(f"code: what is stored as {payload['url']} has another SHA-256: submit the job again")
    return {"files": unpack(data, Path(payload["folder"]))}


async def _fetch(payload: dict[str, Any]) -> bytes:
    name, kind = bus_name(payload["url"]), EntityKind.INSTANCE
    async with Bus.connect(
        payload["servers"], name=payload["sid"], kind=kind, token=payload.get("token")
    ) as bus:
        for left in reversed(range(_ATTEMPTS)):
            try:
                if (await bus.objects.info(name)).size > ARCHIVE_BYTES:
                    raise BadModel(f"code: {payload['url']} is larger than {ARCHIVE_BYTES >> 20} MiB")
                return b"".join([piece async for piece in bus.objects.get(name, 0, ARCHIVE_BYTES)])
            except NotFound:
                raise BadModel("code: its archive is not on the bus any more: submit the job again") from None
            except Conflict:
                if not left:
                    raise
    raise AssertionError("unreachable")


def unpack(data: bytes, folder: Path) -> int:
    """Unpacks an archive into an empty folder, for reading only; returns the number of files.

    All names, kinds and sizes are checked before the first file is written, and the bytes again while they
    come.

    Raises:
        BadModel: it is no archive of code, or breaks a rule; one line.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if reason := refuse(entries):
                raise BadModel(f"code: {reason}")
            for entry in entries:
                _extract(archive, entry, folder)
    except _DAMAGES as error:
        raise BadModel(f"code: the archive is damaged: {error}") from None
    for path, _, _ in os.walk(folder, topdown=False):
        if path != str(folder):  # that one is renamed yet
            os.chmod(path, 0o555)
    return len(entries)


def refuse(entries: list[zipfile.ZipInfo]) -> str:
    """Why an archive with these entries is not unpacked; empty if it is."""
    if len(entries) > ARCHIVE_FILES:
        return f"{len(entries):,} files, at most {ARCHIVE_FILES:,} are unpacked"
    if (size := sum(entry.file_size for entry in entries)) > UNPACKED_BYTES:
        return f"{size:,} bytes of files, at most {UNPACKED_BYTES:,} are unpacked"
    for entry in entries:
        if reason := refuse_name(entry.orig_filename) or _refuse_kind(entry):
            return reason
    return refuse_twins(entry.orig_filename for entry in entries)


def _refuse_kind(entry: zipfile.ZipInfo) -> str:
    name, mode = entry.orig_filename, entry.external_attr >> 16
    if entry.is_dir() or (mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG)):
        return f"{name!r} is a link, a folder or a device; only plain files travel"
    if entry.flag_bits & _ENCRYPTED or entry.compress_type not in _KINDS:
        return f"{name!r} is encrypted, or compressed in another way than by deflate"
    if entry.file_size > max(RATIO_FREE_BYTES, MOST_RATIO * entry.compress_size):
        return f"{name!r} would grow {entry.file_size // max(1, entry.compress_size):,}-fold"
    return ""


def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, folder: Path) -> None:
    target = folder.joinpath(*entry.orig_filename.split("/"))
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    left = entry.file_size
    with archive.open(entry) as packed, os.fdopen(os.open(target, flags, 0o444), "wb") as file:
        while piece := packed.read(_PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise BadModel(f"code: {entry.orig_filename!r} is larger than it says")
            file.write(piece)
    if left:
        raise BadModel(f"code: {entry.orig_filename!r} is smaller than it says")
