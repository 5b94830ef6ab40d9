"""Files that nobody has put there for us to write through, or to wait at."""

from __future__ import annotations

import errno
import os
import stat

from schemas.errors import BadInput

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_NO_PLAIN_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


def plain(path: str | os.PathLike[str], flags: int) -> int:
    """For `open(path, …, opener=plain)`: follows no link and waits at no pipe; mode 0600 where it is made.
    `/dev/null` is taken, too: whoever does not want a log names it.

    Raises:
        BadInput: a link, a pipe, a folder or another device is there.
    """
    try:
        found = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_PLAIN_FILE:
            raise
        raise no_plain_file(path) from None
    return _checked(found, path)


def text_of(path: str | os.PathLike[str]) -> str:
    """What a file says, also one that a link names; a pipe would have us wait.

    Raises:
        BadInput: a pipe or a device is there.
    """
    found = _checked(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path)
    with os.fdopen(found, encoding="utf-8") as file:
        return file.read()


def no_plain_file(path: str | os.PathLike[str]) -> BadInput:
    return BadInput(f"{path} is no plain file: remove it, somebody has put it there")


def _checked(found: int, path: str | os.PathLike[str]) -> int:
    status = os.fstat(found)
    if stat.S_ISREG(status.st_mode) or os.path.samestat(status, os.stat(os.devnull)):
        return found
    os.close(found)
    raise no_plain_file(path)
