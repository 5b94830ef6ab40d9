"""The folders of the instances' local stores on a node (draft §6), and their removal.

The folder `<root>/<job>/<sid>/` outlives an incarnation, so that the next one on this node finds what the
former one wrote. It is removed with its job, or after a week without a write, because an agent is not
notified of jobs that ended while it was away.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from bus.files.removal import remove_folder
from bus.logs import get_logger

log = get_logger("cluster")


class StoreFolders:
    """The folders below `root`. With `keep` none is ever removed. All methods block briefly on the disk.

    A job's folder without a write for `left_behind_s` is removed when an agent starts.
    """

    def __init__(self, root: Path, *, keep: bool = False, left_behind_s: float = 7 * 86_400.0) -> None:
        self._left_behind_s = left_behind_s
        self._root = root.absolute()
        self._keep = keep

    def folder(self, job: str, sid: str) -> Path:
        """An instance's own folder, not created here. Both names are subject tokens, so they hold no path."""
        return self._root / job / sid

    def drop(self, job: str) -> None:
        """Remove the stores of a job that has been cleaned up."""
        if not self._keep:
            _remove(self._root / job)

    def drop_left_behind(self) -> None:
        """Remove folders of jobs that ended while the agent was away; called when it starts."""
        if self._keep or not self._root.is_dir():
            return
        oldest = time.time() - self._left_behind_s
        for job in self._root.iterdir():
            # no deeper: an instance's code may have nested folders without end
            paths = (job, *job.glob("*"), *job.glob("*/*"))
            if max(path.lstat().st_mtime for path in paths) < oldest:
                _remove(job)


def _remove(folder: Path) -> None:
    if not remove_folder(folder):
        log.warning("local stores not removed: remove the folder yourself", folder=str(folder))


def renewal_of(incarnation: str) -> str:
    """Name of the file, in an instance's folder, with the credential that replaces its first one."""
    return f"credential-{incarnation}"


def write_for_instance(folder: Path, name: str, text: str) -> bool:
    """Write a file to an instance's folder, readable only by its system user; return whether it succeeded.

    The instance owns that folder: no link that it put there is followed, and nothing is read.
    """
    partial = f".{name}.{secrets.token_hex(8)}"
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        log.warning("no place for an instance's new credential", folder=str(folder), reason=error.strerror)
        return False
    try:
        owner = os.fstat(folder_fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o600, dir_fd=folder_fd), "w", encoding="ascii") as file:
            if owner.st_uid != os.geteuid():
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(text)
        os.replace(partial, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=folder_fd)
        log.warning("an instance has no new credential", folder=str(folder), reason=error.strerror)
        return False
    finally:
        os.close(folder_fd)
    return True
