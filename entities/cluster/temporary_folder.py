"""A node's scratch folder: temporary files of its instances, gone with the agent however that ends.

An agent that is killed can't tidy up after itself. Each holds a lock in its folder, which ends with its
process: the next agent on the machine removes folders whose lock nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

PREFIX = "dmsc-node-"
LOCK = ".lock"
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
FRESH_S = 60.0
"""A folder as young as this may not have its lock yet."""


class TemporaryFolder:
    """One folder, from its making to `remove`."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = os.open(self.path / LOCK, _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Twice is fine."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Removes what killed agents of this user have left in `parent`; returns it."""
    removed = []
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
            if time.time() - folder.lstat().st_mtime < FRESH_S or not _abandoned(folder):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _abandoned(folder: Path) -> bool:
    """Raises `OSError` where there is no lock: another version's folder is left alone."""
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
        raise PermissionError(f"{folder} is not ours")
    lock = os.open(folder / LOCK, _FLAGS)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
