"""Which roots count, as a file says it that a rotation changes under the guard's eyes (ADR-0039).

Whoever is connected by the old root is thrown out once when the mesh's own processes have their new
credentials, and comes back by these; then a note beside the file says so. After the grace the server itself
ends what is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bus.logs import get_logger
from bus.security.trust_roots import TrustRoots
from entities.authorizer.access.reloaded_file import ReloadedFile
from entities.authorizer.disconnection import Disconnections
from schemas.errors import DmscError

log = get_logger("authorizer")


class RootsFile:
    """`present` is what the file says. Raises `BadInput` at first, never later.

    `evictions`: by which this guard ends old connections; None: another guard does.
    """

    def __init__(self, path: Path, evictions: Disconnections | None) -> None:
        self._path = path
        self._file = ReloadedFile(path, TrustRoots.parse, "file of roots", "it says which roots count")
        self._evictions = evictions
        self._cut = self._file.value.handed_over

    def present(self) -> TrustRoots:
        return self._file.value

    @asynccontextmanager
    async def followed(self, every_s: float) -> AsyncIterator[None]:
        """Looks at the file every so often until the end of the block."""

        async def follow() -> None:
            while True:
                await asyncio.sleep(every_s)
                self._file.refresh()
                await self._cut_off(2 * every_s)

        task = asyncio.create_task(follow(), name="roots")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _cut_off(self, again_s: float) -> None:
        """Until the second look all guards have read the file, too."""
        roots = self._file.value
        if roots.handed_over == self._cut:
            return
        if roots.before and roots.handed_over and self._evictions is not None:
            try:
                ended = await self._evictions.throw_out_other_roots(roots.root, again_s)
                roots.note_ended(self._path)
            except (DmscError, OSError) as error:  # the next look tries again
                log.error("connections by the old root not ended yet", reason=str(error))
                return
            log.info("connections by the old root ended", connections=ended)
        self._cut = roots.handed_over
