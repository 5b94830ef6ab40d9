"""What was struck from outside goes on the audit stream, behind the scenes: no fault waits for it.

The mesh hears nothing of it before, nor does anything in it that recovers read it (ADR-0010).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dmsc.chaos.patience import END_S, persistently
from dmsc.chaos.report import Fault
from dmsc.client.async_client import AsyncClient
from schemas.errors import DmscError

GIVEN_UP_S = 5.0
"""How long is waited where the run is broken off."""

Tell = Callable[[Fault], None]


@asynccontextmanager
async def auditing(client: AsyncClient, say: Callable[[str], None]) -> AsyncIterator[Tell]:
    """Yields what tells a gateway of a fault, once one answers. At the end all are told, or `say` hears
    of those that are not."""
    telling: set[asyncio.Task[None]] = set()

    async def tell(fault: Fault) -> None:
        key = secrets.token_hex(16)  # asked again, it is the same fault
        what = (fault.victim, fault.kind.value)
        try:
            await persistently(lambda: client.tell_outside_fault(*what, idempotency_key=key))
        except DmscError as error:
            say(f"{fault.victim} {fault.kind.value}: not on the audit stream: {error.text}")

    patience_s = GIVEN_UP_S
    try:
        yield lambda fault: telling.add(asyncio.create_task(tell(fault)))
        patience_s = END_S
    finally:
        if telling:
            _, late = await asyncio.wait(telling, timeout=patience_s)
            for task in late:
                task.cancel()
            if late:
                say(f"{len(late)} faults are not on the audit stream: no gateway answered in time")
            await asyncio.gather(*telling, return_exceptions=True)
