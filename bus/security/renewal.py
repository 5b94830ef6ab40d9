"""What has taken the place of a credential, or of a root, since a process was given it.

A process keeps the text that it began with; here stands in which file its successor will be. Who dials
looks there first, so that a connection which the server ends comes back by the new one (ADR-0039).
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
"""Bytes of such a file that are read."""


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
    """From here on, `token` is replaced by what the file says, once it says something else.

    `make`: of the file's text what is shown; it may raise `DmscError`, then the text is not taken.
    `told`: the file in which `taken` says which one we have.
    """
    if token:
        _followed.setdefault(token, _Followed(path, make, token, told))


def taken(token: str) -> None:
    """Says to who wrote the file that its text is in use, and whatever follows from it."""
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
    """By which a credential is named in `told`."""
    return hashlib.sha256(text.strip().encode()).hexdigest()


def present_of(token: str) -> str:
    """What is to be shown in place of `token`, as far as this process knows."""
    followed = _followed.get(token)
    return token if followed is None else followed.present


def look(token: str) -> str:
    """The same, after a look at the file. A file that is away or damaged changes nothing."""
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
