"""MG and SR register with the orchestrator (draft §4.4(1)): at start, on a reconnect, every 10 s.

And whenever a new one leads: it knows only whom it overheard.
"""

from __future__ import annotations

import asyncio

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.leadership import Leadership
from schemas.signals import NodeRegistration

log = get_logger("mesh-registration")

REPEAT_S = 10.0  # a new orchestrator learns of everyone within this time, also where a message was lost


async def keep_registered(bus: Bus, registration: NodeRegistration) -> None:
    """Repeat the registration until cancelled; an absent orchestrator is no error."""
    again = asyncio.Event()

    async def reconnected() -> None:
        again.set()

    async def new_leader(message: Leadership, envelope: Envelope) -> None:
        again.set()

    bus.on_reconnect(reconnected)
    await bus.subscribe(subjects.LEADER, new_leader)
    while True:
        again.clear()
        try:
            await bus.command(
                subjects.MESH_REGISTRATION, registration, deadline_s=REPEAT_S, sid=registration.sid
            )
        except DmscError as error:
            log.info("orchestrator does not take the registration yet", code=error.code, error=error.text)
            pause_s = 1.0
        else:
            pause_s = REPEAT_S
        try:
            async with asyncio.timeout(pause_s):
                await again.wait()
        except TimeoutError:
            pass
