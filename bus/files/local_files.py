"""Files below a folder of this machine, reached without following symbolic links (openat2(2)).

Processes that write below the folder need not be trusted: an instance that puts a link where another process
reads or writes gets no rights of that process. Each path is walked anew from the folder's own descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

_OPENAT2 = 437
_NO_MAGIC, _NO_SYMLINKS, _BENEATH = 2, 4, 8
_libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def open_beneath(folder: int, path: str, flags: int, mode: int = 0) -> int:
    """Opens `path` below the directory `folder` and returns a descriptor; follows no link and no `..`.

    Raises:
        OSError: there is no such file, or a link is on the way.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    if sys.platform == "linux":
        how = _How(flags, mode, _BENEATH | _NO_SYMLINKS | _NO_MAGIC)
        name = ctypes.c_char_p(os.fsencode(path))
        numbers = ctypes.c_long(_OPENAT2), ctypes.c_long(folder)
        descriptor = int(_libc.syscall(*numbers, name, ctypes.byref(how), ctypes.c_long(ctypes.sizeof(how))))
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number not in (errno.ENOSYS, errno.EPERM):
            raise OSError(number, os.strerror(number), path)
    return _step_by_step(folder, path, flags, mode)


def _step_by_step(folder: int, path: str, flags: int, mode: int) -> int:
    """Like `open_beneath`, for systems without openat2."""
    *parents, leaf = Path(path).parts or (".",)
    if ".." in (*parents, leaf) or os.path.isabs(path):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    at = os.dup(folder)
    try:
        for name in parents:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        return os.open(leaf, flags, mode, dir_fd=at)
    finally:
        os.close(at)


class ContainedFolder:
    """The files below `root`, which itself may be reached by links: the caller could name their target."""

    def __init__(self, root: str) -> None:
        self.root = root

    @contextlib.contextmanager
    def _top(self, *, make: bool = False) -> Iterator[int]:
        if make:
            os.makedirs(self.root, exist_ok=True)
        top = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield top
        finally:
            os.close(top)

    @contextlib.contextmanager
    def _parent(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yields the descriptor of the folder that contains a file, and the file's name there."""
        with self._top(make=make) as top:
            folder, leaf = os.path.split(name)
            if make:
                self._make(top, folder)
            parent = open_beneath(top, folder or ".", os.O_RDONLY | os.O_DIRECTORY)
            try:
                yield parent, leaf
            finally:
                os.close(parent)

    @staticmethod
    def _make(top: int, folder: str) -> None:
        path = ""
        for part in Path(folder).parts:
            above = open_beneath(top, path or ".", os.O_RDONLY | os.O_DIRECTORY)
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=above)
            finally:
                os.close(above)
            path = os.path.join(path, part)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[int]:
        """Yields a descriptor for reading a plain file."""
        with self._top() as top:
            file = open_beneath(top, name, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(errno.EINVAL, "it is no plain file", name)
                yield file
            finally:
                os.close(file)

    @contextlib.contextmanager
    def replacing(self, name: str, temporary: str) -> Iterator[int]:
        """Yields a descriptor of a new file, which replaces `name` if the block raises nothing."""
        with self._parent(name, make=True) as (parent, leaf):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            file = open_beneath(parent, temporary, flags, 0o666)
            try:
                try:
                    yield file
                    os.fsync(file)
                finally:
                    os.close(file)
                os.replace(temporary, leaf, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=parent)
                raise

    def names(self) -> list[str]:
        """The names of all plain files, with `/`; empty if there is no such folder."""
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._top() as top:
            for folder, _, files, at in os.fwalk(".", dir_fd=top, follow_symlinks=False):
                for file in files:
                    with contextlib.suppress(OSError):
                        if stat.S_ISREG(os.stat(file, dir_fd=at, follow_symlinks=False).st_mode):
                            names.append(os.path.normpath(os.path.join(folder, file)))
        return names

    def remove(self, name: str) -> None:
        with self._parent(name) as (parent, leaf):
            os.unlink(leaf, dir_fd=parent)

    def prune(self, name: str) -> None:
        """Removes the folders above a file that are now empty, `root` included."""
        folder = os.path.dirname(name)
        with contextlib.suppress(OSError):
            while folder:
                with self._parent(folder) as (parent, leaf):
                    os.rmdir(leaf, dir_fd=parent)
                folder = os.path.dirname(folder)
            os.rmdir(self.root)
