"""Packs the folder of a job's `code` for its journey: which files, how large, and always to the same bytes.

Files that travel are plain files below the folder. Left out are names that begin with a dot, bytecode,
environments, `runs`, state folders of a mesh, links that lead out of the folder, and what git ignores, if the
folder is in a repository and `include` is empty. `schemas.job_file.code` has the limits; nodes check again.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from schemas.errors import BadJob
from schemas.job_file.code import (
    ARCHIVE_BYTES,
    ARCHIVE_FILES,
    MOST_RATIO,
    UNPACKED_BYTES,
    CodeSpec,
    refuse_name,
    refuse_twins,
)
from schemas.urls import RUNS

_BYTECODE = ("*.pyc", "*.pyo")
_NEVER = frozenset({"__pycache__", "node_modules", "site-packages"})
_MARKS = ("pyvenv.cfg", "bus_token", "guard.json")
"""A folder with one of these is a virtual environment, or has the keys of a mesh."""
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class PackedCode:
    """An archive: its bytes, their SHA-256, and for each file's name the CRC-32 of its content."""

    data: bytes
    sha256: str
    checksums: Mapping[str, int]

    def as_spec(self, spec: CodeSpec) -> CodeSpec:
        """What is submitted in place of the folder."""
        return CodeSpec(
            sha256=self.sha256, bytes=len(self.data), requirements=spec.requirements, python=spec.python
        )


def pack_folder(spec: CodeSpec, more: Mapping[str, bytes] | None = None) -> PackedCode:
    """The archive of a job's folder, with `more` files (name → content).

    Raises:
        BadJob: there is no such folder, it is beyond a limit, or a file can't travel; one line.
    """
    files: dict[str, Path | bytes] = {}
    if spec.folder is not None:
        files |= files_of(Path(spec.folder), spec.include, spec.exclude)
    return pack(files | dict(more or {}), spec.folder or "the code")


def files_of(folder: Path, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> dict[str, Path]:
    """The files that travel, by their names in the archive.

    Raises:
        BadJob: it is no folder, or nothing in it would travel.
    """
    include, exclude = tuple(include), tuple(exclude)
    if not folder.is_dir():
        raise BadJob(f"code.folder: {folder} is no folder")
    root = folder.resolve()
    known = None if include else _unignored(root)
    found: dict[str, Path] = {}
    for path in _walk(root):
        name = path.relative_to(root).as_posix()
        if known is not None and name not in known:
            continue
        if include and not any(_matches(name, pattern) for pattern in include):
            continue
        if not any(_matches(name, pattern) for pattern in exclude):
            found[name] = path
    if not found:
        raise BadJob(f"code.folder: nothing in {folder} would travel; look at code.include and code.exclude")
    return found


def pack(files: Mapping[str, Path | bytes], where: str) -> PackedCode:
    """An archive of files: sorted, without times, so that equal files give equal bytes.

    Raises:
        BadJob: a limit is exceeded, or a name can't travel.
    """
    names = sorted(files)
    for reason in (*map(refuse_name, names), refuse_twins(names)):
        if reason:
            raise BadJob(f"code: {reason}")
    if len(names) > ARCHIVE_FILES:
        raise BadJob(
            f"code: {where} has {len(names):,} files, at most {ARCHIVE_FILES:,} travel; "
            "list folders under code.exclude"
        )
    sizes = {name: _size(files[name]) for name in names}
    if sum(sizes.values()) > UNPACKED_BYTES:
        raise BadJob(_too_large(where, "files", UNPACKED_BYTES, sizes))
    buffer, packed, checksums = io.BytesIO(), {}, {}
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            content = _read(files[name], name)
            begin = buffer.tell()
            archive.writestr(*_entry(name, content))
            packed[name] = buffer.tell() - begin
            checksums[name] = zlib.crc32(content)
    data = buffer.getvalue()
    if len(data) > ARCHIVE_BYTES:
        raise BadJob(_too_large(where, "compressed files", ARCHIVE_BYTES, packed))
    return PackedCode(data, hashlib.sha256(data).hexdigest(), checksums)


def _entry(name: str, content: bytes) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    dense = len(content) > MOST_RATIO * len(zlib.compress(content, 1))
    info.compress_type = zipfile.ZIP_STORED if dense else zipfile.ZIP_DEFLATED
    return info, content


def _size(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _read(source: Path | bytes, name: str) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise BadJob(f"code: {name}: {error.strerror}; list it under code.exclude") from None


def _too_large(where: str, what: str, limit: int, sizes: Mapping[str, int]) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN]
    shown = ", ".join(f"{name} {_mebibytes(sizes[name])}" for name in largest)
    return (
        f"code: {where} has {_mebibytes(sum(sizes.values()))} of {what}, at most {_mebibytes(limit)} travel; "
        f"the largest: {shown}; list what the job does not import under code.exclude"
    )


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):,.1f} MiB"


def _walk(root: Path) -> Iterable[Path]:
    pending = [root]
    while pending:
        folder = pending.pop()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        if any(entry.name in _MARKS for entry in entries):
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _NEVER or (folder == root and entry.name == RUNS):
                continue
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            elif _travels(entry, root) and not any(fnmatchcase(entry.name, each) for each in _BYTECODE):
                yield Path(entry.path)


def _travels(entry: os.DirEntry[str], root: Path) -> bool:
    """Whether an entry is a plain file, perhaps by a link that stays in the folder."""
    try:
        if not stat.S_ISREG(entry.stat().st_mode):
            return False
    except OSError:  # a link that leads nowhere
        return False
    return not entry.is_symlink() or Path(entry.path).resolve().is_relative_to(root)


def _unignored(root: Path) -> frozenset[str] | None:
    """The files that git does not ignore; None where there is no git, or no repository."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return None
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(listing, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(os.fsdecode(name) for name in done.stdout.split(b"\0") if name)


def _matches(name: str, pattern: str) -> bool:
    """As in a .gitignore: a pattern without `/` matches any part, others the path from the folder on."""
    pattern = pattern.removeprefix("./").rstrip("/")
    parts = name.split("/")
    if "/" not in pattern:
        return any(fnmatchcase(part, pattern) for part in parts)
    return any(
        fnmatchcase("/".join(parts[:count]), pattern.lstrip("/")) for count in range(1, len(parts) + 1)
    )
