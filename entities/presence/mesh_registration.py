"""MG and SR register with the orchestrator (draft §4.4(1)): at start, after a reconnect, and periodically.

They also register when a new orchestrator leads, because it knows only the nodes that it has heard itself.
"""

from __future__ import annotations

import asyncio

from bus import subjects
from bus.connection import Bus
from bus.logs import get_logger
from schemas.envelope import Envelope
from schemas.errors import DmscError
from schemas.leadership import Leadership
from schemas.registry import ServiceRecord
from schemas.signals import NodeRegistration

log = get_logger("mesh-registration")


def registration_of(record: ServiceRecord, *services: str) -> NodeRegistration:
    """The registration of the gateway or router that has this record, and offers these services."""
    return NodeRegistration(
        sid=record.sid,
        kind=record.kind,
        incarnation=record.incarnation,
        endpoint=record.endpoint,
        services=services,
        capability=record.capability,
    )


async def keep_registered(bus: Bus, registration: NodeRegistration, *, repeat_s: float = 10.0) -> None:
    """Repeat the registration until cancelled; an absent orchestrator is no error.

    A new orchestrator learns of every node within `repeat_s`, even if a message is lost.
    """
    due = asyncio.Event()

    async def on_reconnect() -> None:
        due.set()

    async def on_leader(message: Leadership, envelope: Envelope) -> None:
        due.set()

    bus.on_reconnect(on_reconnect)
    await bus.subscribe(subjects.LEADER, on_leader)
    while True:
        due.clear()
        try:
            await bus.command(
                subjects.MESH_REGISTRATION, registration, deadline_s=repeat_s, sid=registration.sid
            )
        except DmscError as error:
            log.info("orchestrator does not take the registration yet", code=error.code, error=error.text)
            pause_s = 1.0
        else:
            pause_s = repeat_s
        try:
            async with asyncio.timeout(pause_s):
                await due.wait()
        except TimeoutError:
            pass
