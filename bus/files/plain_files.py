"""Opens plain files only: no link through which we would write elsewhere, no pipe at which we would wait."""

from __future__ import annotations

import errno
import os
import stat

from schemas.errors import BadInput

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_NO_PLAIN_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


def plain(path: str | os.PathLike[str], flags: int) -> int:
    """An opener for `open(path, …, opener=plain)` that follows no link and waits at no pipe.

    A new file gets mode 0600. `/dev/null` is accepted, too, for callers that want no log.

    Raises:
        BadInput: the path is a link, a pipe, a folder or another device.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_PLAIN_FILE:
            raise
        raise no_plain_file(path) from None
    return _checked(descriptor, path)


def text_of(path: str | os.PathLike[str]) -> str:
    """The text of a plain file, which may be named by a link.

    Raises:
        BadInput: the path is a pipe or a device.
    """
    descriptor = _checked(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        return file.read()


def no_plain_file(path: str | os.PathLike[str]) -> BadInput:
    return BadInput(f"{path} is no plain file: remove it, somebody has put it there")


def _checked(descriptor: int, path: str | os.PathLike[str]) -> int:
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) or os.path.samestat(status, os.stat(os.devnull)):
        return descriptor
    os.close(descriptor)
    raise no_plain_file(path)
