"""A node agent's temporary folder, removed with the agent however the agent ends.

An agent that is killed can't clean up. Each agent holds a lock in its folder, which ends with its process;
the next agent on the machine removes folders whose lock nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path

from bus.files.removal import remove_folder

PREFIX = "dmsc-node-"
LOCK = ".lock"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class TemporaryFolder:
    """A folder that exists and is locked until `remove`."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path / LOCK, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove the folder; a second call does nothing."""
        remove_folder(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path, *, fresh_s: float = 60.0) -> list[Path]:
    """Remove the folders in `parent` that killed agents of this user have left; return them.

    A folder younger than `fresh_s` may not have its lock yet.
    """
    removed = []
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if time.time() - folder.lstat().st_mtime < fresh_s or not _is_abandoned(folder):
                continue
            remove_folder(folder)
            removed.append(folder)
    return removed


def _is_abandoned(folder: Path) -> bool:
    """Whether nobody holds the folder's lock; raises `OSError` without a lock, as of another version."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not ours")
    lock = os.open(folder / LOCK, _FLAGS)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
