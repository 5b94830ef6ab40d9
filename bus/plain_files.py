"""Files that nobody has put there for us to write through: an `opener` for `open`, or a descriptor."""

from __future__ import annotations

import errno
import os

from schemas.errors import BadInput

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_NO_PLAIN_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


def plain(path: str | os.PathLike[str], flags: int) -> int:
    """For `open(path, …, opener=plain)`: follows no link and waits at no pipe; mode 0600 where it is made.

    Raises:
        BadInput: a link, a pipe or a folder is there.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_PLAIN_FILE:
            raise
        raise BadInput(f"{path} is no plain file: remove it, somebody has put it there") from None
