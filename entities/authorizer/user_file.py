"""The users' file, read again when it changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bus.logs import get_logger
from entities.authorizer.access_rules import User, parse_users
from schemas.errors import BadInput

log = get_logger("authorizer")


class UserFile:
    """The users, read again when the file changed. A broken edit keeps the users from before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._stamp()
        self.users: tuple[User, ...] = self._read()

    async def keep_fresh(self, every_s: float) -> None:
        """Looks at the file every so often, until cancelled."""
        while True:
            await asyncio.sleep(every_s)
            self.refresh()

    def refresh(self) -> bool:
        """Look at the file; True where the users are new. Never raises."""
        try:
            seen = self._stamp()
            if seen == self._seen:
                return False
            self._seen = seen
            self.users = self._read()
        except BadInput as error:
            log.error("tokens file not usable; the users from before stay", error=error.text)
            return False
        log.info("tokens file read", users=len(self.users))
        return True

    def _stamp(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise _unreadable(self._path, error) from None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> tuple[User, ...]:
        try:
            return parse_users(self._path.read_text(encoding="utf-8"), str(self._path))
        except OSError as error:
            raise _unreadable(self._path, error) from None
        except UnicodeDecodeError:
            raise BadInput(f"{self._path}: is not UTF-8 text") from None


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(f"{path}: {error.strerror or 'unreadable'}; write a users list there")
