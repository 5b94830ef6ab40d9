"""Where the instances of a node keep their local stores (draft §6), and when those go.

`<root>/<job>/<sid>/`: an instance's folder outlives its incarnations, so that the next one on this node finds
what the former wrote. It goes with its job, or after a week in which nobody wrote to it: of a job that ended
while its agent was away, nobody is told.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from bus.logs import get_logger

LEFT_BEHIND_S = 7 * 86_400.0
"""Age at which a job's folder is taken for one that nobody will ask for again."""

log = get_logger("cluster")


class Stores:
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
