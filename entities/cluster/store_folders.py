"""Where the instances of a node keep their local stores (draft §6), and when those go.

`<root>/<job>/<sid>/`: an instance's folder outlives its incarnations, so that the next one on this node finds
what the former wrote. It goes with its job, or after a week in which nobody wrote to it: of a job that ended
while its agent was away, nobody is told.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from pathlib import Path

from bus.logs import get_logger

LEFT_BEHIND_S = 7 * 86_400.0
"""Age at which a job's folder is taken for one that nobody will ask for again."""

log = get_logger("cluster")


class StoreFolders:
    """The folders below `root`; `keep`: none is ever removed. All methods block on the disk, briefly."""

    def __init__(self, root: Path, *, keep: bool = False) -> None:
        self._root = root.absolute()
        self._keep = keep

    def folder(self, job: str, sid: str) -> Path:
        """An instance's own folder; it makes it itself. Both names are subject tokens: no path is in them."""
        return self._root / job / sid

    def drop(self, job: str) -> None:
        """The job has been cleaned up."""
        if not self._keep:
            _remove(self._root / job)

    def drop_left_behind(self) -> None:
        """Folders of jobs that ended unheard, when the agent starts."""
        if self._keep or not self._root.is_dir():
            return
        oldest = time.time() - LEFT_BEHIND_S
        for job in self._root.iterdir():
            if max((path.lstat().st_mtime for path in (job, *job.rglob("*"))), default=0.0) < oldest:
                _remove(job)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.warning("local stores not removed: remove the folder yourself", folder=str(folder))


def renewal_of(incarnation: str) -> str:
    """The file, in an instance's folder, of the credential that takes the place of the one it began with."""
    return f"credential-{incarnation}"


def write_for_instance(folder: Path, name: str, text: str) -> bool:
    """A file in an instance's folder, for its system user alone; whether it is there now.

    The instance owns that folder: nothing that it has put there is followed, and nothing read.
    """
    partial = f".{name}.{secrets.token_hex(8)}"
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        log.warning("no place for an instance's new credential", folder=str(folder), reason=error.strerror)
        return False
    try:
        owner = os.fstat(place)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o600, dir_fd=place), "w", encoding="ascii") as file:
            if owner.st_uid != os.geteuid():
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(text)
        os.replace(partial, name, src_dir_fd=place, dst_dir_fd=place)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(partial, dir_fd=place)
        log.warning("an instance has no new credential", folder=str(folder), reason=error.strerror)
        return False
    finally:
        os.close(place)
    return True
