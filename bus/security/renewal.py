"""Replaces a credential or a root in a running process.

A process keeps the token that it began with. This module notes the file in which its successor will appear.
The dialer looks there first, so that a connection which the server has ended comes back with the new
credential (ADR-0039).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bus.logs import get_logger
from schemas.errors import DmscError

log = get_logger("bus.security.renewal")

LONGEST = 1 << 16
"""Most bytes that are read of such a file."""


@dataclass(slots=True)
class _Followed:
    path: Path
    make: Callable[[str], str | None]
    present: str
    told: Path | None
    seen: tuple[int, int, int] = (0, 0, 0)


_followed: dict[str, _Followed] = {}


def follow(
    token: str | None, path: Path, make: Callable[[str], str | None] = str, told: Path | None = None
) -> None:
    """Replaces `token` by the content of a file from now on, as soon as the file has another content.

    Args:
        token: The token that the process began with.
        path: The file with its successor.
        make: Makes the token from the file's text; if it raises `DmscError`, the text is not used.
        told: The file in which `taken` reports the token in use.
    """
    if token:
        _followed.setdefault(token, _Followed(path, make, token, told))


def taken(token: str) -> None:
    """Reports to the file's writer that the present token is in use, by its digest in the file `told`."""
    followed = _followed.get(token)
    if followed is None or followed.told is None:
        return
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(followed.told, flags, 0o600), "w", encoding="ascii") as file:
            file.write(digest(followed.present))
    except OSError as error:
        log.warning("who gave a credential is not told", file=str(followed.told), reason=error.strerror)


def digest(text: str) -> str:
    """The digest that names a credential in the file `told`."""
    return hashlib.sha256(text.strip().encode()).hexdigest()


def present_of(token: str) -> str:
    """The present successor of `token`, without reading the file again."""
    followed = _followed.get(token)
    return token if followed is None else followed.present


def look(token: str) -> str:
    """The present successor of `token`, after reading the file; a missing or damaged file changes nothing."""
    followed = _followed.get(token)
    if followed is None:
        return token
    try:
        status = followed.path.lstat()
        seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        if seen == followed.seen:
            return followed.present
        text = _read(followed.path)
    except OSError:
        return followed.present
    followed.seen = seen
    try:
        followed.present = followed.make(text) or followed.present
    except DmscError as error:
        log.warning("a new credential is not usable", file=str(followed.path), reason=error.text)
    return followed.present


def _read(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        return file.read(LONGEST).strip()
