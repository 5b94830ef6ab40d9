"""A watch of a bucket that begins as soon as the bus is ready: entities start in any order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.logs import get_logger
from bus.messaging.key_value import Bucket, Mend, WatchHandler
from schemas.errors import DmscError

log = get_logger("watch")


@asynccontextmanager
async def watching(
    bucket: Bucket, handler: WatchHandler, *, mend: Mend | None = None, retry_s: float = 0.5
) -> AsyncIterator[None]:
    """Watches for the time of the block, which begins once the watch has; see `Bucket.watch`.

    `retry_s`: between attempts to begin it while the bus is not ready.
    """
    while True:
        try:
            watch = await bucket.watch(handler, mend=mend)
            break
        except DmscError as error:
            log.info(
                "a bucket can't be watched yet", bucket=bucket.row.name, code=error.code, error=error.text
            )
            await asyncio.sleep(retry_s)
    try:
        yield
    finally:
        await watch.stop()
