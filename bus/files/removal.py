"""Removes folders that others' code has filled, which may be nested deeper than Python can call itself."""

from __future__ import annotations

import itertools
import os
import secrets
from contextlib import suppress
from pathlib import Path

MOST_FOLDERS = 1 << 22
"""Most folders below the first level that are removed: a process that goes on making them has no end."""
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_folder(folder: str | Path, *, dir_fd: int | None = None) -> bool:
    """Removes a folder with all that is in it, read-only folders too; follows no link.

    `shutil.rmtree` calls itself for each level, and so ends with a `RecursionError` where somebody wants it
    to. Here each folder's folders are moved up to the first level before it goes.

    Args:
        folder: Its path.
        dir_fd: The open folder that a relative path begins at.

    Returns:
        Whether nothing is left of it.
    """
    with suppress(OSError):
        top = os.open(folder, _FLAGS, dir_fd=dir_fd)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(folder, dir_fd=dir_fd)
    try:
        os.stat(folder, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _empty(top: int) -> None:
    prefix, numbers = f".gone-{secrets.token_hex(4)}-", itertools.count()
    pending = _folders_of(top)
    while pending:
        name = pending.pop()
        with suppress(OSError):
            inner = os.open(name, _FLAGS, dir_fd=top)
            try:
                for child in _folders_of(inner):
                    if (number := next(numbers)) >= MOST_FOLDERS:
                        return
                    if _moved_up(child, inner, f"{prefix}{number}", top):
                        pending.append(f"{prefix}{number}")
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def _folders_of(folder: int) -> list[str]:
    """The names of an open folder's folders; all else in it is removed."""
    found = []
    with suppress(OSError):
        os.fchmod(folder, 0o700)
        for entry in list(os.scandir(folder)):
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    found.append(entry.name)
                else:
                    os.unlink(entry.name, dir_fd=folder)
    return found


def _moved_up(child: str, parent: int, name: str, top: int) -> bool:
    try:
        opened = os.open(child, _FLAGS, dir_fd=parent)
        try:
            os.fchmod(opened, 0o700)  # a folder that is moved has to be writable itself
        finally:
            os.close(opened)
        os.rename(child, name, src_dir_fd=parent, dst_dir_fd=top)
    except OSError:
        return False
    return True
