"""The root credentials that count, from a file that a rotation changes while the guard runs (ADR-0039).

Once the mesh's own processes have their new credentials, the connections by the old root are closed one time,
and the processes reconnect with the new ones; then a note beside the file says so. After the grace period the
server itself closes the remaining connections.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from bus.logs import get_logger
from bus.security.trust_roots import TrustRoots
from bus.tasks import background
from entities.authorizer.access.reloaded_file import ReloadedFile
from entities.authorizer.disconnection import Disconnections
from schemas.errors import DmscError

log = get_logger("authorizer")


class RootsFile:
    """The file's roots in `present`. Only the constructor raises `BadInput`.

    `disconnections` closes old connections; None if another guard does that.
    """

    def __init__(self, path: Path, disconnections: Disconnections | None) -> None:
        self._path = path
        self._file = ReloadedFile(path, TrustRoots.parse, "file of roots", "it says which roots count")
        self._disconnections = disconnections
        self._closed_for = self._file.value.handed_over

    def present(self) -> TrustRoots:
        return self._file.value

    def followed(self, every_s: float) -> AbstractAsyncContextManager[asyncio.Task[None]]:
        """Check the file every `every_s` until the block ends."""
        return background(self._follow(every_s), name="roots")

    async def _follow(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._file.refresh()
            await self._close_old(2 * every_s)

    async def _close_old(self, again_s: float) -> None:
        """Close connections by the old root once; by the second look all guards have read the file, too."""
        roots = self._file.value
        if roots.handed_over == self._closed_for:
            return
        if roots.before and roots.handed_over and self._disconnections is not None:
            try:
                ended = await self._disconnections.disconnect_other_roots(roots.root, again_s)
                roots.note_ended(self._path)
            except (DmscError, OSError) as error:  # the next check tries again
                log.error("connections by the old root not ended yet", reason=str(error))
                return
            log.info("connections by the old root ended", connections=ended)
        self._closed_for = roots.handed_over
